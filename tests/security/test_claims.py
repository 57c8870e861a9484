"""What the project says about pickles, code from repositories and shells, held against its whole source."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from embedded.stack_set_up import read_entrypoints

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("dflash", "tasks", "flows", "embedded")
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.package"}


def calls(tree: ast.AST) -> Iterator[tuple[str, dict[str, Any], ast.Call]]:
    """Each call: its dotted name, its constant keywords, itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {
                word.arg: word.value.value
                for word in node.keywords
                if word.arg is not None and isinstance(word.value, ast.Constant)
            }
            yield ast.unparse(node.func), keywords, node


def problems(source: str) -> list[str]:
    """What one file does that nothing here may do."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"{node.lineno}: imports {name}" for name in names if name in FORBIDDEN_MODULES]  # type: ignore[attr-defined]
    for name, keywords, node in calls(tree):
        last = name.rsplit(".", 1)[-1]
        unsafe = (
            (name == "torch.load" and keywords.get("weights_only") is not True)
            or keywords.get("allow_pickle") is True
            or keywords.get("shell") is True
            or keywords.get("trust_remote_code") is True
            or (last == "from_pretrained" and keywords.get("use_safetensors") is False)
            or (name.startswith("dist.") and "_object" in last)  # torch's collectives for objects pickle them
            or name in {"yaml.load", "yaml.unsafe_load", "eval", "exec", "os.system"}
        )
        if unsafe:
            found.append(f"{node.lineno}: calls {name}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "yaml.load(text)",
        "eval(text)",
        "dist.broadcast_object_list(box, src=0)",
        "dist.all_gather_object(found, mine)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert problems(source)
    assert not problems("torch.load(path, weights_only=True)\nyaml.safe_load(text)")


def test_nothing_is_unpickled_evaluated_or_run_by_a_shell() -> None:
    files = [file for package in PACKAGES for file in sorted((REPOSITORY / package).rglob("*.py"))]
    assert len(files) > 100
    found = {str(file.relative_to(REPOSITORY)): bad for file in files if (bad := problems(file.read_text()))}
    assert found == {}


def run_models() -> Iterator[type[pydantic.BaseModel]]:
    """Every pydantic model of the library."""
    for file in sorted((REPOSITORY / "dflash").rglob("*.py")):
        source = file.read_text()
        if "trust_remote_code" in source:
            name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
            for _, value in inspect.getmembers(importlib.import_module(name), inspect.isclass):
                if issubclass(value, pydantic.BaseModel):
                    yield value


def test_code_from_a_models_repository_is_run_only_when_asked() -> None:
    fields = [
        model.model_fields["trust_remote_code"] for model in run_models() if "trust_remote_code" in model.model_fields
    ]
    assert len(fields) >= 2
    assert [field.default for field in fields] == [False] * len(fields)
    from dflash.model import features, target_loading

    parameter = inspect.signature(target_loading.load_model).parameters["trust_remote_code"]
    assert parameter.default is inspect.Parameter.empty  # each caller says it
    loaders = [value for _, value in inspect.getmembers(features.Target) if inspect.ismethod(value)]
    said = [inspect.signature(loader).parameters.get("trust_remote_code") for loader in loaders]
    assert [item.default for item in said if item is not None] == [False]


def test_results_that_travel_between_runs_are_json() -> None:
    """Prefect pickles results by default."""
    entrypoints = read_entrypoints(REPOSITORY / "deployments" / "prefect.yaml")
    assert len(entrypoints) > 10
    for name, entrypoint in entrypoints.items():
        module, _, attribute = entrypoint.rpartition(".")
        flow = getattr(importlib.import_module(module), attribute)
        assert (flow.persist_result, flow.result_serializer) == (True, "json"), name
