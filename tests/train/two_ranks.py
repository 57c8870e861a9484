"""Started by torchrun: trains the tiny drafter on this rank's share.

Arguments: run folder, sharding, `halved`, `warm` or `whole`, shard files.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from dflash.data.batches import LocalShards
from dflash.model.drafter import Drafter
from dflash.train.config import OptimizerConfig, TrainConfig
from dflash.train.loop import Run
from dflash.train.sharding import shard
from dflash.train.world import join


def main(run_dir: Path, sharding: str, packs: str, shards: list[Path]) -> None:
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    torch.set_num_threads(1)
    with join("gloo", timeout_s=120) as world:
        drafter = Drafter(tiny.tiny_config())
        drafter.initialize(torch.Generator().manual_seed(1))
        if sharding == "fsdp":
            shard(drafter)
        elif packs == "warm" and not world.is_first:
            drafter.initialize(torch.Generator().manual_seed(2))  # as another device would round, only more
        config = TrainConfig(
            pack_tokens=30,  # seven packs: the second rank ends without one
            num_anchors=6,
            num_epochs=1,
            accumulation=2 // world.size,
            sharding=sharding,
            warm_start=packs == "warm",
            optimizer=OptimizerConfig(learning_rate=3e-3),
        )
        run = Run(config, tiny.TinyTarget(), drafter, LocalShards.scan(shards), run_dir)
        run.engine.halved = packs == "halved"  # as a checkpoint says after an out-of-memory error
        run.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [Path(name) for name in sys.argv[4:]])
