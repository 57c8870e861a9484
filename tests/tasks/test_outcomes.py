"""What a parent reads of its children: from the store, and nothing that isn't theirs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash.errors import TrainingError
from dflash.eval.config import EvaluateRun, ExportRun
from dflash.eval.record import EvaluationRecord, Measured, PromptSet, write_evaluation
from dflash.eval.report import OVERALL, AcceptanceReport, GroupReport
from dflash.storage import open_store
from dflash.train.run import TrainRun
from tasks.outcomes import Evaluated, read_export, read_measured, read_training

VERSION = "v000002-abcdefabcdef"


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local folders need no keys, so no server that has them."""
    monkeypatch.setattr("tasks.outcomes.s3_credentials", lambda: None)


def training(output: Path) -> TrainRun:
    return TrainRun(dataset="data", version=VERSION, target="target", output=str(output))


def measured(checkpoint: Path, tau: float, run: EvaluateRun) -> None:
    """Put an evaluation beside a checkpoint."""
    group = GroupReport(3, 30, 60, tau, [0.5], 9.0, None, 0.5, 0.5, None)
    record = EvaluationRecord(
        drafter=Measured(uri=str(checkpoint), step=8, weights_sha256="a" * 64),
        target="target",
        prompts=PromptSet(uri="p.jsonl", sha256="b" * 64, num_prompts=3, thinking={}, checked_against=None),
        options=run,
        report=AcceptanceReport("tau", {OVERALL: group}, [], 16, 0.0),
        environment={},
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    write_evaluation(open_store(str(checkpoint)), record)


def test_a_training_is_read_at_its_output(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"result\.json can't be seen from here.*s3://"):
        read_training.fn(training(tmp_path))
    found = {"checkpoint": "c", "step": 8, "data": {"manifest": VERSION}}
    (tmp_path / "result.json").write_text(json.dumps(found))
    assert read_training.fn(training(tmp_path)) == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"data": {"manifest": "v000003-x"}}), f"a training on v000003-x, expected {VERSION}"),
        ("{", "damaged"),
        ("{}", "damaged"),
        ("[]", "damaged"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_what_another_training_left_is_not_taken(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(TrainingError, match=message):
        read_training.fn(training(tmp_path))


@pytest.mark.parametrize("named", ["checkpoint", "run", "export"])
def test_an_evaluation_is_read_beside_the_drafter_that_was_measured(tmp_path: Path, named: str) -> None:
    steps = [tmp_path / "checkpoints" / f"step-0000000{step}" for step in (4, 8)]
    for step in steps if named != "export" else []:
        step.mkdir(parents=True)
        (step / "checkpoint.json").write_text("{}")
    place, asked = {"checkpoint": (steps[0],) * 2, "run": (steps[1], tmp_path), "export": (tmp_path,) * 2}[named]
    run = EvaluateRun(checkpoint=str(asked), prompts="p.jsonl")
    with pytest.raises(TrainingError, match=r"evaluation\.json can't be seen"):
        read_measured.fn(run)
    measured(place, 1.75, run)
    assert read_measured.fn(run) == Evaluated(f"{open_store(str(place)).uri}/evaluation.json", "a" * 64, 1.75)


def test_an_evaluation_on_other_prompts_is_not_taken(tmp_path: Path) -> None:
    run = EvaluateRun(checkpoint=str(tmp_path), prompts="p.jsonl")
    measured(tmp_path, 9.0, run.model_copy(update={"limit": 1}))
    with pytest.raises(TrainingError, match="other parameters than this run asked for"):
        read_measured.fn(run)


def test_an_export_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    run = ExportRun(checkpoint="c", output=str(tmp_path), format="sglang")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TrainingError, match=r"config\.json can't be seen"):
        read_export.fn(run)
    (tmp_path / "config.json").touch()
    assert read_export.fn(run) == open_store(str(tmp_path)).uri
