from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash.errors import IntegrityError, StorageError
from dflash.storage import LocalStore
from dflash.train.checkpoint import CheckpointFolder, Snapshot, load
from dflash.train.checkpoint_record import RECORD, WEIGHTS, record_digest
from dflash.train.checkpoint_store import CheckpointStore
from dflash.train.curves import METRICS, read_metrics
from dflash.train.newest import newest_checkpoint
from tests.storage.faults import FaultPlan, FaultStore


def save(run: Path, step: int, value: float | None = None) -> Path:
    """A checkpoint of a run that has metrics of five more steps already."""
    run.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"step": number}) + "\n" for number in range(1, step + 6)]
    (run / METRICS).write_text("".join(rows))
    weights = {"w": torch.full((3,), float(step if value is None else value))}
    return CheckpointFolder(run / "checkpoints", keep=99).save(Snapshot(step, weights, {"lr": 0.5}, {"note": "x"}))


def weight_of(path: Path) -> float:
    return float(load(path).weights["w"][0])


def test_what_is_uploaded_comes_back_with_the_metrics_up_to_it(tmp_path: Path) -> None:
    mirror = CheckpointStore(LocalStore(str(tmp_path / "there")), keep=2)
    for step in (4, 8, 12):
        mirror.upload(save(tmp_path / "run", step))
    assert mirror.steps() == [8, 12]
    folders = {info.key.partition("/")[0] for info in mirror.store.list()}
    assert folders == {"step-00000008", "step-00000012"}
    assert weight_of(mirror.fetch(8, tmp_path / "back" / "checkpoints")) == 8
    mirror.fetch_metrics(8, tmp_path / "back")
    assert [row["step"] for row in read_metrics(tmp_path / "back")] == list(range(1, 9))


def test_an_upload_that_is_cut_anywhere_leaves_the_old_checkpoint_and_can_be_repeated(tmp_path: Path) -> None:
    first, second = save(tmp_path / "run", 1), save(tmp_path / "run", 2)
    count = FaultPlan()
    CheckpointStore(FaultStore(LocalStore(str(tmp_path / "count")), count), keep=1).upload(second)
    assert len(count.calls) >= 4
    for point in range(1, len(count.calls) + 1):
        for when in ("before", "after"):
            inner = LocalStore(str(tmp_path / f"{point}-{when}"))
            CheckpointStore(inner, keep=1).upload(first)
            plan = FaultPlan(point, when)  # type: ignore[arg-type]
            with pytest.raises(StorageError, match="planned fault"):
                CheckpointStore(FaultStore(inner, plan), keep=1).upload(second)
            mirror = CheckpointStore(inner, keep=1)
            newest = mirror.steps()[-1]
            assert weight_of(mirror.fetch(newest, tmp_path / f"back-{point}-{when}")) == newest
            mirror.upload(second)
            assert mirror.steps() == [2]
            assert {info.key.partition("/")[0] for info in inner.list()} == {"step-00000002"}


def test_a_step_that_was_trained_again_replaces_its_record_and_never_mixes(tmp_path: Path) -> None:
    mirror = CheckpointStore(LocalStore(str(tmp_path / "there")), keep=3)
    mirror.upload(save(tmp_path / "first", 5, 1.0))
    again = save(tmp_path / "second", 5, 2.0)
    (tmp_path / "second" / METRICS).write_text(json.dumps({"step": 1, "loss": 3}) + "\n")
    mirror.upload(again)
    mirror.upload(again)
    assert weight_of(mirror.fetch(5, tmp_path / "back")) == 2
    names = [info.key for info in mirror.store.list()]
    assert len(names) == 4, names
    mirror.fetch_metrics(5, tmp_path / "back")
    assert read_metrics(tmp_path / "back") == [{"step": 1, "loss": 3}]


def test_a_record_that_names_other_files_leads_nowhere(tmp_path: Path) -> None:
    mirror = CheckpointStore(LocalStore(str(tmp_path / "there")), keep=3)
    mirror.upload(save(tmp_path / "run", 5))
    path = tmp_path / "there" / "step-00000005" / RECORD
    record = json.loads(path.read_text())["record"]
    record["files"]["../../elsewhere"] = record["files"][WEIGHTS]
    path.write_text(json.dumps({"sha256": record_digest(record), "record": record}))
    with pytest.raises(IntegrityError, match=r"names the files \['\.\./\.\./elsewhere', .*expected model.safetensors"):
        mirror.fetch(5, tmp_path / "back")
    assert not list((tmp_path / "back").glob("step-*"))


def test_a_checkpoint_with_a_missing_or_altered_part_is_refused(tmp_path: Path) -> None:
    mirror = CheckpointStore(LocalStore(str(tmp_path / "there")), keep=3)
    mirror.upload(save(tmp_path / "run", 5))
    (weights,) = (tmp_path / "there" / "step-00000005").glob("*.model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"\x00")
    with pytest.raises(IntegrityError, match="sha256"):
        mirror.fetch(5, tmp_path / "back")
    weights.unlink()
    with pytest.raises(IntegrityError, match=f"isn't whole.*remove its {RECORD}"):
        mirror.fetch(5, tmp_path / "back")
    assert not list((tmp_path / "back").glob("step-*"))


def test_what_only_looks_like_a_part_of_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    mirror = CheckpointStore(LocalStore(str(tmp_path / "there")), keep=3)
    path = save(tmp_path / "run", 5)
    mirror.upload(path)
    other_digits = "step-" + "\N{ARABIC-INDIC DIGIT NINE}" * 8
    mirror.store.put_if_absent(f"{other_digits}/{RECORD}", b"{}")
    mirror.store.put_if_absent(f"step-00000005/notes.{METRICS}", b"{}")
    (path.parent / other_digits).mkdir()
    assert mirror.steps() == [5]
    assert CheckpointFolder(path.parent).latest() == path
    newest = newest_checkpoint(mirror.store.uri, {info.key for info in mirror.store.list()})
    assert newest == f"{mirror.store.uri}/step-00000005"
    mirror.fetch_metrics(5, tmp_path / "back")
    assert [row["step"] for row in read_metrics(tmp_path / "back")] == list(range(1, 6))
