"""Target ranks feed drafter ranks: the same losses as one rank, an exact resume, and a clear end when a side dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.train.checkpoint import CheckpointFolder, load
from dflash.train.curves import read_metrics
from dflash.train.job import Places, Watch, train_run
from dflash.train.run import TrainRun
from tests.train.rank_processes import Ranks
from tests.train.tiny_run import publish_rows, tiny_run, write_target

SPLIT = {"mode": "split", "target_ranks": 2, "drafter_ranks": 1}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    publish_rows(str(folder / "data"), folder / "made")
    return str(folder / "data")


def alone(tmp_path: Path, dataset: str, target: Path, **train: Any) -> list[float]:
    run = TrainRun.model_validate(tiny_run(dataset, target, str(tmp_path / "alone"), **train))
    train_run(run, Places(tmp_path / "work-alone"), Watch(), torch.device("cpu"))
    return [row["loss"] for row in read_metrics(tmp_path / "alone")]


def test_two_target_ranks_and_one_drafter_rank_train_as_one_rank_does(
    tmp_path: Path, dataset: str, target: Path
) -> None:
    expected = alone(tmp_path, dataset, target)
    ranks = Ranks(tmp_path, tiny_run(dataset, target, str(tmp_path / "split"), topology=SPLIT), 3)
    assert ranks.wait() == [0, 0, 0], ranks.log()
    assert [row["loss"] for row in read_metrics(tmp_path / "split")] == expected
    newest = [CheckpointFolder(tmp_path / name / "checkpoints").latest() for name in ("alone", "split")]
    weights = [load(path).weights for path in newest if path is not None]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
