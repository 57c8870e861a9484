from __future__ import annotations

import json
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.errors import IntegrityError, StorageError, TrainingError
from dflash.storage.files import file_sha256
from dflash.train import checkpoint
from dflash.train.checkpoint import CheckpointFolder, Snapshot, load
from dflash.train.checkpoint_record import OPTIMIZER, RECORD, WEIGHTS, record_digest


def snapshot(step: int) -> Snapshot:
    weights = {"w": torch.full((3, 2), float(step)), "b": torch.arange(2.0)}
    return Snapshot(step, weights, {"state": {"m": torch.ones(3) * step}, "lr": 0.5}, {"note": "x", "step": step})


def rewrite(path: Path, **fields: object) -> None:
    """Change a record and let its digests fit, as a foreign writer would."""
    record: dict[str, Any] = json.loads((path / RECORD).read_text())["record"]
    record |= {"files": {name: file_sha256(path / name) for name in (WEIGHTS, OPTIMIZER)}} | fields
    (path / RECORD).write_text(json.dumps({"sha256": record_digest(record), "record": record}))


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_file_of_something_else_is_refused_although_its_digest_fits(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = CheckpointFolder(tmp_path).save(snapshot(1))
    (path / name).write_bytes(content)
    rewrite(path)
    with pytest.raises(IntegrityError, match=rf"{name} is no .*Resume from an older"):
        load(path)
    torch.save([1], path / OPTIMIZER)
    rewrite(path)
    with pytest.raises(IntegrityError, match="Resume from an older"):
        load(path)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(snapshot(1)).rename(tmp_path / "step-00000099")
    with pytest.raises(IntegrityError, match=r"step-00000099 is that of step 1: .*Resume from an older"):
        load(path)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(snapshot(7))
    back = load(path)
    assert back.step == 7
    assert torch.equal(back.weights["w"], torch.full((3, 2), 7.0))
    assert torch.equal(back.optimizer["state"]["m"], torch.ones(3) * 7)
    assert (back.optimizer["lr"], back.record["note"]) == (0.5, "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000007"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 10, 3):
        folder.save(snapshot(step))
    assert [path.name for path in folder.paths()] == ["step-00000003", "step-00000010"]
    assert folder.latest() == tmp_path / "step-00000010"
    assert CheckpointFolder(tmp_path / "none").latest() is None


def test_a_damaged_one_that_was_put_aside_is_no_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (99_999_999, 100_000_000):
        folder.save(snapshot(step))
    (tmp_path / "step-100000000").rename(tmp_path / "step-100000000.damaged")
    assert [path.name for path in folder.paths()] == ["step-99999999"]
    assert folder.save(snapshot(100_000_000)) == folder.latest()


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, RECORD])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_any_damage_is_found(tmp_path: Path, name: str, damage: str) -> None:
    path = CheckpointFolder(tmp_path).save(snapshot(1))
    data = bytearray((path / name).read_bytes())
    if damage == "remove":
        (path / name).unlink()
    elif damage == "cut":
        (path / name).write_bytes(data[:-10])
    else:
        at = data.index(b'"note"') + 9 if name == RECORD else len(data) // 2
        data[at] ^= 1
        (path / name).write_bytes(data)
    with pytest.raises(IntegrityError, match="Resume from an older"):
        load(path)


def test_a_record_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).save(snapshot(1))
    for record in ([], {"record": 3, "sha256": ""}, {"record": {"files": [], "step": 1}, "sha256": ""}):
        (path / RECORD).write_text(json.dumps(record))
        with pytest.raises(IntegrityError):
            load(path)
    torch_2 = {"environment": {"torch": 2}}
    sections: list[dict[str, Any]] = [{"step": True}, {"step": -1}, {"environment": []}, torch_2, {"data": [1]}]
    for section in sections:
        rewrite(path, **{"step": 1, **section})
        with pytest.raises(IntegrityError, match=f"holds what no run writes: {next(iter(section))}"):
            load(path)
    (path / RECORD).write_text("[" * 100_000)
    with pytest.raises(IntegrityError):
        load(path)


@pytest.mark.parametrize("fault", ["save_file", "sync_path", "record_digest"])
def test_a_crash_leaves_the_old_checkpoint_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(snapshot(1))

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, fault, crash)
        with pytest.raises(KeyboardInterrupt):
            folder.save(snapshot(2))
    assert folder.latest() == tmp_path / "step-00000001"
    assert load(folder.save(snapshot(2))).step == 2


def test_uploads_run_behind_and_a_failed_one_is_told(tmp_path: Path) -> None:
    uploaded: list[str] = []
    go = threading.Event()

    def upload(path: Path) -> None:
        go.wait(10)
        assert (path / RECORD).exists()
        uploaded.append(path.name)

    folder = CheckpointFolder(tmp_path, keep=1, upload=upload)
    for step in (1, 2, 3):
        folder.save(snapshot(step))
    assert len(folder.paths()) == 3
    go.set()
    folder.close()
    assert uploaded == ["step-00000001", "step-00000002", "step-00000003"]

    def failing(_: Path) -> None:
        raise OSError("no route")

    folder = CheckpointFolder(tmp_path / "other", upload=failing)
    folder.save(snapshot(1))
    with pytest.raises(TrainingError, match=r"no route.*local copy is whole"):
        folder.close()


@pytest.mark.parametrize("max_bytes", [0, 200, 1000])
def test_a_full_disk_leaves_the_checkpoints_before_it(tmp_path: Path, max_bytes: int) -> None:
    folder = CheckpointFolder(tmp_path)
    first = folder.save(snapshot(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        with pytest.raises(StorageError, match="step-00000002 can't be written"):
            folder.save(snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert load(first).step == 1
    assert load(folder.save(snapshot(2))).step == 2
