from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.data.batches import LocalShards
from dflash.errors import TrainingError
from dflash.model.drafter import Drafter
from dflash.train.config import TrainConfig
from dflash.train.curves import read_metrics
from dflash.train.hooks import Hooks
from dflash.train.loop import Run

MakeRun = Callable[[Hooks], Run]


@pytest.fixture
def make_run(tmp_path: Path, target: Any, make_drafter: Callable[[], Drafter], source: LocalShards) -> MakeRun:
    config = TrainConfig(pack_tokens=40, num_anchors=6, num_epochs=3, checkpoint_every=1, keep_checkpoints=1)
    return lambda hooks: Run(config, target, make_drafter(), source, tmp_path, hooks)


def fail_at(ask: int) -> Callable[[], bool]:
    asks = iter(range(1, 1000))

    def should_stop() -> bool:
        if next(asks) == ask:
            raise TrainingError("the numbers are bad")
        return False

    return should_stop


def test_a_run_that_fails_waits_for_its_uploads(make_run: MakeRun) -> None:
    whole: list[str] = []

    def upload(path: Path) -> None:
        time.sleep(0.5)
        assert (path / "checkpoint.json").exists()
        whole.append(path.name)

    with pytest.raises(TrainingError, match="the numbers are bad"):
        make_run(Hooks(fail_at(3), upload)).train()
    assert whole == ["step-00000001", "step-00000002"]


def test_an_upload_that_fails_beside_it_does_not_hide_why_the_run_failed(make_run: MakeRun) -> None:
    def upload(path: Path) -> None:
        time.sleep(0.5)
        raise OSError("no route to the store")

    with pytest.raises(TrainingError, match="the numbers are bad") as caught:
        make_run(Hooks(fail_at(2), upload)).train()
    assert ["no route to the store" in note for note in caught.value.__notes__] == [True]


def test_an_upload_that_fails_ends_the_run_and_keeps_the_local_checkpoint(make_run: MakeRun, tmp_path: Path) -> None:
    def upload(path: Path) -> None:
        raise OSError("no route to the store")

    with pytest.raises(TrainingError, match=r"upload of checkpoint .*no route to the store.*resume from it"):
        make_run(Hooks(upload=upload)).train()
    newest = max((tmp_path / "checkpoints").glob("step-*/checkpoint.json"))
    assert newest.parent.name == f"step-{read_metrics(tmp_path)[-1]['step']:08d}"
