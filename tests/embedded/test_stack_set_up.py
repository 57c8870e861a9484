from __future__ import annotations

import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pydantic
import pytest
import yaml
from prefect import Flow

from dflash.errors import ServiceError, StorageError, UsageError
from embedded import stack_set_up
from embedded.processes import start_process, stop_process
from embedded.stack import up
from embedded.stack_set_up import PARAMETER_MODELS, SetUp, read_entrypoints

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments" / "prefect.yaml"


def test_each_deployment_is_a_flow_that_takes_its_parameters() -> None:
    parameters = {
        item["name"]: item.get("parameters") for item in yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]
    }
    entrypoints = read_entrypoints(DEPLOYMENTS)
    assert {"tokenize-completions", "merge-dataset", "train-drafter"} <= entrypoints.keys()
    for name, entrypoint in entrypoints.items():
        module, _, attribute = entrypoint.rpartition(".")
        flow = getattr(importlib.import_module(module), attribute)
        assert isinstance(flow, Flow), entrypoint
        if parameters[name] is not None:
            flow.validate_parameters(parameters[name])


def test_a_deployment_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    file.write_text("deployments:\n" + "- {name: a, entrypoint: flows.a.a}\n" * 2)
    with pytest.raises(UsageError, match="names a more than once"):
        read_entrypoints(file)


def models_in(annotation: Any, seen: set[type[pydantic.BaseModel]]) -> None:
    """Collect the models that an annotation names, and those of their fields."""
    for part in get_args(annotation):
        models_in(part, seen)
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel) and annotation not in seen:
        seen.add(annotation)
        for field in annotation.model_fields.values():
            models_in(field.annotation, seen)


def test_a_change_of_any_parameter_is_applied_by_the_next_up() -> None:
    """Else the forms of the UI keep the old fields."""
    seen: set[type[pydantic.BaseModel]] = set()
    for entrypoint in read_entrypoints(DEPLOYMENTS).values():
        module, _, attribute = entrypoint.rpartition(".")
        for annotation in get_type_hints(getattr(importlib.import_module(module), attribute).fn).values():
            models_in(annotation, seen)
    assert len(seen) > 15
    files = {inspect.getfile(base) for model in seen for base in model.mro() if base.__module__.startswith("dflash.")}
    folder = DEPLOYMENTS.parents[1] / "dflash"
    assert {str(Path(file).relative_to(folder)) for file in files} <= set(PARAMETER_MODELS)


@pytest.fixture
def set_up(tmp_path: Path) -> Iterator[Callable[[str], SetUp]]:
    started = []

    def start(program: str) -> SetUp:
        log = tmp_path / "set-up.log"
        command = [sys.executable, "-S", "-c", program]
        started.append(start_process(command, log=log, folder=tmp_path, environment=dict(os.environ), attached=False))
        return SetUp(started[-1], log)

    yield start
    for process in started:
        stop_process(process)


BUSY = "import time; end = time.monotonic() + 1.6\nwhile time.monotonic() < end: pass\n"
TALKS = "import time\nfor step in range(16): print(step, flush=True); time.sleep(0.1)\n"
DONE = "print('done: pools', flush=True)"


@pytest.mark.parametrize("program", [BUSY, TALKS], ids=["works", "talks"])
def test_a_set_up_that_does_something_is_waited_for(
    set_up: Callable[[str], SetUp], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(stack_set_up, "QUIET_S", 1.0)
    set_up(program + DONE).wait_for("pools")


def test_a_set_up_that_hangs_is_not_waited_for(set_up: Callable[[str], SetUp], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_set_up, "QUIET_S", 0.3)
    started = time.monotonic()
    with pytest.raises(ServiceError, match=r"applying pools hangs, with no sign of life for 0 s(.|\n)*half way"):
        set_up("import time; print('half way', flush=True); time.sleep(60)").wait_for("pools")
    assert time.monotonic() - started < 20


def test_a_set_up_that_ends_early_is_told_with_its_last_words(set_up: Callable[[str], SetUp]) -> None:
    with pytest.raises(ServiceError, match=r"applying pools failed(.|\n)*no route"):
        set_up("raise SystemExit('no route')").wait_for("pools")


def test_a_place_that_cannot_hold_a_stack_is_named(tmp_path: Path) -> None:
    (tmp_path / ".dflash").write_text("a file")
    with pytest.raises(StorageError, match=r"\.dflash: the file system failed: .*Not a directory"):
        up(tmp_path, str)
