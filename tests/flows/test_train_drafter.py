from __future__ import annotations

from typing import Any

import pytest

from dflash.errors import GateError
from dflash.runs import DrafterRun
from flows.train_drafter import enforce, previous_drafter, render


def config(**fields: Any) -> DrafterRun:
    run = {"dataset": "s3://bucket/train", "target": "/models/t", "output": "s3://bucket/drafters", "device": "cuda"}
    return DrafterRun.model_validate({"run": run, "prompts": "s3://bucket/heldout.jsonl", **fields})


def result(tau: float, previous: float | None) -> dict[str, Any]:
    return {
        "manifest": "v000002-abc",
        "step": 1234,
        "checkpoint": "s3://bucket/drafters/v000002-abc/checkpoints/step-00001234",
        "evaluation": "s3://bucket/e.json",
        "tau": tau,
        "previous": None if previous is None else {"checkpoint": "s3://old", "tau": previous},
        "export": None,
    }


@pytest.mark.parametrize(
    ("fields", "tau", "previous"),
    [
        ({}, 1.0, None),
        ({}, 2.98, 3.0),
        ({}, 4.0, 3.0),
        ({"max_tau_drop": 0.5}, 2.5, 3.0),
        ({"min_tau": 2.5}, 2.5, None),
    ],
)
def test_a_drafter_that_holds_passes(fields: dict[str, Any], tau: float, previous: float | None) -> None:
    enforce(config(**fields), result(tau, previous))
    assert f"{tau:.3f}" in render(result(tau, previous))


@pytest.mark.parametrize(
    ("fields", "tau", "previous", "message"),
    [
        ({}, 2.97, 3.0, r"tau is 2.970, that of the previous drafter s3://old is 3.000 .* at most 0.02 may be lost"),
        ({"max_tau_drop": 0}, 2.9999, 3.0, r"may be lost"),
        ({"min_tau": 2.5}, 2.49, None, r"the limit min_tau is 2.5.*step-00001234 was not released"),
        ({"min_tau": 2.5, "max_tau_drop": 1}, 2.49, 2.5, r"min_tau"),
    ],
)
def test_a_drafter_that_falls_behind_is_refused(
    fields: dict[str, Any], tau: float, previous: float | None, message: str
) -> None:
    with pytest.raises(GateError, match=message):
        enforce(config(**fields), result(tau, previous))


def test_a_drafter_is_held_against_the_one_that_servers_have() -> None:
    released = {"weights_sha256": "a", "checkpoint": "s3://c", "export": "s3://e"}
    assert previous_drafter(None, released, "b") == "s3://e"
    assert previous_drafter(None, released | {"export": None}, "b") == "s3://c"
    assert previous_drafter(None, released, "a") is None
    assert previous_drafter(None, {}, "a") is None
    assert previous_drafter("s3://named", released, "a") == "s3://named"


def test_each_version_has_its_own_run_folder_and_each_drafter_its_own_export() -> None:
    asked = config(num_prompts=7, export_format="vllm")
    training = asked.training("v000002-abc")
    assert (training.version, training.output) == ("v000002-abc", "s3://bucket/drafters/v000002-abc")
    evaluation = asked.evaluation("s3://bucket/c", "v000002-abc", compare=False)
    assert (evaluation.dataset_version, evaluation.limit, evaluation.device) == ("v000002-abc", 7, "cuda")
    assert (evaluation.compare, evaluation.min_tau) == (False, None)
    exports = [asked.export("s3://bucket/c", "v000002-abc", digest * 64) for digest in "ab"]
    places = [export.output for export in exports if export is not None]
    assert places == [f"s3://bucket/drafters/v000002-abc/exports/{digest * 16}-vllm" for digest in "ab"]
    assert {(export.prompts, export.num_prompts) for export in exports if export is not None} == {(asked.prompts, 2)}
    assert config(export_format=None).export("s3://bucket/c", "v000002-abc", "a" * 64) is None
