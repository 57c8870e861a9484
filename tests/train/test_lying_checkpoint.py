"""Checkpoints whose digests fit and whose content doesn't: foreign writers, other drafters, hand-made records."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("state", [{}, {"optimizer": {}, "replay": {}}, {"optimizer": {"param_groups": 3}}])
def test_another_optimiser_is_refused(resume: Resume, state: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"optimizer\.pt of checkpoint .* isn't one of this drafter"):
        resume(lambda path: torch.save(state, path / OPTIMIZER))
