from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml
from prefect import Flow

from dflash.errors import UsageError
from embedded.stack_set_up import read_entrypoints

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
