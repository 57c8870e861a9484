"""Checkpoints whose digests fit and whose content doesn't: foreign writers, other drafters, hand-made records."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dflash.data.batches import LocalShards
from dflash.errors import DflashError, IntegrityError
from dflash.model.drafter import Drafter
from dflash.storage.files import file_sha256
from dflash.train.checkpoint_record import OPTIMIZER, RECORD, WEIGHTS, record_digest
from dflash.train.doctor import examine
from dflash.train.loop import Run
from tests.train.conftest import config

Resume = Callable[..., None]


@pytest.fixture
def resume(tmp_path: Path, target: Any, make_drafter: Callable[[], Drafter], source: LocalShards) -> Resume:
    """Lie about a run of two steps, then go on from it."""
    settings = config(max_steps=2)
    path = Run(settings, target, make_drafter(), source, tmp_path).train().checkpoint

    def run(lie: Callable[[Path], None] = lambda _: None, drop: str = "", **fields: Any) -> None:
        lie(path)
        record = json.loads((path / RECORD).read_text())["record"] | fields
        record["files"] = {name: file_sha256(path / name) for name in (WEIGHTS, OPTIMIZER)}
        record.pop(drop, None)
        (path / RECORD).write_text(json.dumps({"sha256": record_digest(record), "record": record}))
        Run(settings, target, make_drafter(), source, tmp_path)

    return run


@pytest.mark.parametrize("name", ["progress", "config", "environment", "halved"])
def test_a_record_without_what_a_run_needs_is_refused(resume: Resume, tmp_path: Path, name: str) -> None:
    with pytest.raises(IntegrityError, match=f"lacks {name}"):
        resume(drop=name)
    if name == "environment":
        with pytest.raises(IntegrityError, match="step-00000002 lacks environment"):
            examine(str(tmp_path), None, tmp_path)


@pytest.mark.parametrize(
    "changes", [{"step": 1}, {"seconds": "x"}, {"seconds": -1}, {"skipped_rows": None}, {"extra": 1}, {"batch": None}]
)
def test_progress_that_no_run_has_is_refused(resume: Resume, tmp_path: Path, changes: dict[str, Any]) -> None:
    record = json.loads((tmp_path / "checkpoints" / "step-00000002" / RECORD).read_text())["record"]
    with pytest.raises(IntegrityError, match="doesn't tell how far the run was"):
        resume(progress=record["progress"] | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epoch": 2**31}, "tokens, expected"),
        ({"num_tokens": 2**40}, "tokens, expected"),
        ({"shard": 2}, "shard 2 of 2"),
        ({"window": 9}, "of window 9 in a shard of 6 rows"),
        ({"pack": 1000}, "pack 1000 of window 0"),
        ({"num_packs": 13}, "13 packs of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_place_that_is_not_in_the_data_is_refused(
    resume: Resume, tmp_path: Path, changes: dict[str, int], problem: str
) -> None:
    record = json.loads((tmp_path / "checkpoints" / "step-00000002" / RECORD).read_text())["record"]
    batch = record["progress"]["batch"]
    with pytest.raises(IntegrityError, match=f"isn't in the data: .*{problem}"):
        resume(progress=record["progress"] | {"batch": batch | changes})


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def lie(path: Path) -> None:
        weights = safetensors.torch.load_file(path / WEIGHTS)
        change(weights)
        safetensors.torch.save_file(weights, path / WEIGHTS)

    return lie


def test_weights_of_another_drafter_are_refused(resume: Resume) -> None:
    resume()
    with pytest.raises(IntegrityError, match=r"1 weights aren't finite, such as norm\.weight"):
        resume(change_weights(lambda weights: weights["norm.weight"].fill_(float("nan"))))
    with pytest.raises(DflashError, match=r"1 missing \['norm\.weight'\]"):
        resume(change_weights(lambda weights: weights.pop("norm.weight")))
    with pytest.raises(DflashError, match=r"fc\.weight: expected"):
        resume(change_weights(lambda weights: weights.update({"fc.weight": torch.zeros(3)})))


def deflate(path: Path) -> None:
    """Write the optimiser's state anew, each part compressed: a file of kilobytes may hold terabytes then."""
    with zipfile.ZipFile(path / OPTIMIZER) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path / OPTIMIZER, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def overlap(path: Path) -> None:
    """Let every entry of the directory name the largest part."""
    data = bytearray((path / OPTIMIZER).read_bytes())
    with zipfile.ZipFile(path / OPTIMIZER) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        struct.pack_into("<II", data, at + 20, largest.file_size, largest.file_size)
        at = data.find(b"PK\x01\x02", at + 4)
    (path / OPTIMIZER).write_bytes(data)


@pytest.mark.parametrize(("lie", "message"), [(deflate, "parts are compressed"), (overlap, "its parts have")])
def test_a_state_that_would_grow_in_memory_is_refused(
    resume: Resume, lie: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(IntegrityError, match=message):
        resume(lie)


@pytest.mark.parametrize("state", [{}, {"optimizer": {}, "replay": {}}, {"optimizer": {"param_groups": 3}}])
def test_another_optimiser_is_refused(resume: Resume, state: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"optimizer\.pt of checkpoint .* isn't one of this drafter"):
        resume(lambda path: torch.save(state, path / OPTIMIZER))
