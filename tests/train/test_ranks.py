from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.data.batches import LocalShards
from dflash.errors import UsageError
from dflash.model.drafter import Drafter
from dflash.train import loop
from dflash.train.checkpoint import CheckpointFolder, Snapshot, load
from dflash.train.config import OptimizerConfig, ReplayConfig, TrainConfig
from dflash.train.curves import read_metrics
from dflash.train.loop import Run
from dflash.train.world import World


def newest(run_dir: Path) -> Snapshot:
    path = CheckpointFolder(run_dir / loop.CHECKPOINTS).latest()
    assert path is not None
    return load(path)


@pytest.mark.parametrize(
    ("sharding", "packs"),
    [
        ("replicate", "whole"),
        pytest.param("replicate", "warm", marks=pytest.mark.slow),
        ("fsdp", "whole"),
        pytest.param("fsdp", "halved", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(
    tmp_path: Path, target: Any, make_drafter: Callable[[], Drafter], source: LocalShards, sharding: str, packs: str
) -> None:
    config = TrainConfig(
        pack_tokens=30,
        num_anchors=6,
        num_epochs=1,
        accumulation=2,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        warm_start=packs == "warm",
    )
    alone = Run(config, target, make_drafter(), source, tmp_path / "one")
    alone.engine.halved = packs == "halved"
    alone.train()
    script = Path(__file__).with_name("two_ranks.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [str(script), str(tmp_path / "two"), sharding, packs, *map(str, source.paths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [*torchrun, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert one.record["progress"]["batch"] == two.record["progress"]["batch"]
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert set(one.weights) == set(two.weights)
    for name, value in one.weights.items():
        torch.testing.assert_close(two.weights[name], value, rtol=1e-4, atol=1e-6)


def test_replay_is_for_one_rank(
    tmp_path: Path,
    target: Any,
    make_drafter: Callable[[], Drafter],
    source: LocalShards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(World, "current", classmethod(lambda cls: cls(0, 2)))
    with pytest.raises(UsageError, match="one rank"):
        Run(TrainConfig(replay=ReplayConfig(max_bytes=10)), target, make_drafter(), source, tmp_path)
