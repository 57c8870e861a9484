"""Evaluation as a job: from a run model to `evaluation.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.errors import DatasetError, GateError, IntegrityError, ModelError, UsageError
from dflash.eval.config import DecodeConfig, EvaluateRun
from dflash.eval.job import evaluate_run
from dflash.eval.record import read_evaluation, write_evaluation
from dflash.eval.table import HEADERS, losslessness, markdown, tau_rows
from dflash.model.drafter import Drafter
from dflash.storage import S3Store, open_store
from dflash.train.checkpoint_store import CheckpointStore
from tests.data.small_roots import Small, open_root
from tests.eval.small_run import PROMPTS, SmallRun, write_prompts

SHORT = DecodeConfig(max_new_tokens=8)


def run_of(small: SmallRun, **values: object) -> EvaluateRun:
    return EvaluateRun.model_validate(
        {"checkpoint": str(small.folder), "prompts": str(small.prompts), "decode": SHORT} | values
    )


def test_the_newest_checkpoint_is_evaluated_and_recorded(small_run: SmallRun, tmp_path: Path) -> None:
    small_run.save(9, seed=1)
    newest = small_run.save(10)
    result = evaluate_run(run_of(small_run), None, tmp_path / "cache")
    record = result.record
    assert result.uri == f"{newest}/evaluation.json"
    assert (record.drafter.step, record.target) == (10, str(small_run.target))
    assert record.report.groups["overall"].num_identical == 3
    assert list(record.report.groups) == ["overall", "code", "maths"]
    assert record.prompts.thinking == {"off": 1, "template default": 2}
    assert record.environment["torch"]
    assert read_evaluation(open_store(str(newest))) == record
    stored = json.loads((newest / "evaluation.json").read_text())
    weights = json.loads((newest / "checkpoint.json").read_text())["record"]["files"]["model.safetensors"]
    assert (stored["format_version"], stored["drafter"]["weights_sha256"]) == (1, weights)
    again = evaluate_run(run_of(small_run, limit=2), None, tmp_path / "cache")
    assert {prompt.num_prompts for prompt in again.record.report.groups.values()} == {1, 2}
    assert again.record.prompts.sha256 != record.prompts.sha256
    assert read_evaluation(open_store(str(newest))) == again.record


def test_the_table_says_what_the_numbers_mean(small_run: SmallRun, tmp_path: Path) -> None:
    small_run.save(1)
    record = evaluate_run(run_of(small_run), None, tmp_path / "cache").record
    rows = tau_rows(record.report)
    assert [row[0] for row in rows] == ["overall", "code", "maths"]
    assert all(len(row) == len(HEADERS) for row in rows)
    text = markdown(record)
    for part in ("mean over verify rounds", "3 of 3", "not checked for leaks", "| slot | accepted |", "greedy"):
        assert part in text
    sampled = evaluate_run(run_of(small_run, decode=DecodeConfig(max_new_tokens=4, temperature=0.7)), None, tmp_path)
    assert "differ by chance" in losslessness(sampled.record.report)


def test_a_checkpoint_on_s3_is_read_and_evaluated_there(small_run: SmallRun, s3_store: S3Store, tmp_path: Path) -> None:
    path = small_run.save(3)
    credentials = s3_store.credentials
    CheckpointStore(open_store(f"{s3_store.uri}/run/checkpoints", credentials), keep=2).upload(path)
    uri = f"{s3_store.uri}/run"
    result = evaluate_run(run_of(small_run, checkpoint=uri), credentials, tmp_path / "cache")
    assert result.uri == f"{uri}/checkpoints/step-00000003/evaluation.json"
    (copy,) = (tmp_path / "cache").rglob("model.safetensors")
    copy.write_bytes(copy.read_bytes()[:-9])  # a copy that was damaged here is made again
    again = evaluate_run(run_of(small_run, checkpoint=uri), credentials, tmp_path / "cache")
    assert again.record.tau == result.record.tau
    local = evaluate_run(run_of(small_run), None, tmp_path / "cache")
    assert result.record.tau == local.record.tau
    assert result.record.drafter.weights_sha256 == local.record.drafter.weights_sha256


def test_prompts_of_the_training_data_are_refused(small_run: SmallRun, tmp_path: Path) -> None:
    train = str(tmp_path / "train")
    small = Small(open_root(train, tmp_path), tmp_path / "work")
    small.merge(0, 4)
    small_run.save(1)
    assert evaluate_run(run_of(small_run, limit=1), None, tmp_path / "cache").record.prompts.checked_against is None
    found = evaluate_run(run_of(small_run, limit=1, dataset=train), None, tmp_path / "cache")
    assert found.record.prompts.checked_against == f"{small.root.uri} {small.root.manifest().name}"
    leaking = str(write_prompts(tmp_path / "leak.jsonl", [*PROMPTS, PROMPTS[0] | {"id": "s0"}]))
    with pytest.raises(UsageError, match="1 of 4 evaluation prompts are in the training data"):
        evaluate_run(run_of(small_run, dataset=train, prompts=leaking), None, tmp_path / "cache")
    # What the checkpoint says it was trained on is looked at without being asked.
    small_run.save(2, dataset=train, manifest=small.root.manifest().name)
    with pytest.raises(UsageError, match="1 of 4 evaluation prompts are in the training data"):
        evaluate_run(run_of(small_run, prompts=leaking), None, tmp_path / "cache")
    with pytest.raises(DatasetError, match="holds no published version"):
        evaluate_run(run_of(small_run, dataset=str(tmp_path / "nowhere")), None, tmp_path / "cache")


def test_the_gate_fails_after_the_evaluation_is_written(small_run: SmallRun, tmp_path: Path) -> None:
    path = small_run.save(1)
    result = evaluate_run(run_of(small_run, min_tau=3.9), None, tmp_path / "cache")
    assert (path / "evaluation.json").is_file()
    with pytest.raises(GateError, match=r"limit min_tau is 3\.9"):
        result.enforce()
    evaluate_run(run_of(small_run, min_tau=1.0), None, tmp_path / "cache").enforce()


def test_what_cannot_be_evaluated_is_refused(small_run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no drafter"):
        evaluate_run(run_of(small_run), None, tmp_path / "cache")
    path = small_run.save(1)
    record = evaluate_run(run_of(small_run), None, tmp_path / "cache").record
    (path / "evaluation.json").write_text('{"format_version": 2}')
    with pytest.raises(IntegrityError, match=r"no evaluation of version 1.*format_version"):
        read_evaluation(open_store(str(path)))
    fields = record.model_dump(mode="json")
    for changes in ({"groups": {}}, {"groups": {"overall": fields["report"]["groups"]["overall"] | {"tau": 0.5}}}):
        (path / "evaluation.json").write_text(json.dumps(fields | {"report": fields["report"] | changes}))
        with pytest.raises(
            IntegrityError, match=r"no evaluation of version 1.*(lacks overall|overall 0\.5).*Remove it"
        ):
            read_evaluation(open_store(str(path)))
    (path / "evaluation.json").unlink()
    write_evaluation(open_store(str(path)), record)
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    with pytest.raises(IntegrityError, match=r"model\.safetensors .* SHA-256"):
        evaluate_run(run_of(small_run), None, tmp_path / "cache")


@pytest.mark.parametrize(("length", "max_new_tokens"), [(600, 8), (10, 600)])
def test_prompts_beyond_the_targets_positions_are_named(
    small_run: SmallRun, tmp_path: Path, length: int, max_new_tokens: int
) -> None:
    small_run.save(1)
    write_prompts(small_run.prompts, [{"id": "long", "messages": [{"role": "user", "content": "x" * length}]}])
    with pytest.raises(UsageError, match=r"1 of 1 prompts .* 512 positions .*'long'"):
        evaluate_run(run_of(small_run, decode=DecodeConfig(max_new_tokens=max_new_tokens)), None, tmp_path / "cache")


def test_a_drafter_that_is_not_finite_is_refused(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Drafter, "initialize", lambda drafter, *_, **__: drafter.fc.weight.data.fill_(float("nan")))
        small_run.save(1)
    with pytest.raises(ModelError, match=r"1 tensors hold values that aren't finite .* fc\.weight"):
        evaluate_run(run_of(small_run), None, tmp_path / "cache")
    assert not list(small_run.folder.rglob("evaluation.json"))
