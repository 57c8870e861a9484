"""What a rank checks before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dflash.errors import MemoryPlanError
from dflash.manifest import Manifest
from dflash.train import device_memory
from dflash.train.device_memory import check_device
from dflash.train.host_memory import HostMemory
from dflash.train.memory import TargetShape
from dflash.train.plan import PlanRun
from dflash.train.preflight import Prepared, drafter_config
from dflash.train.seats import Seat
from dflash.train.topology import TopologyConfig
from dflash.train.world import World
from flows.parameters import load_parameters

RECIPE = Path(__file__).parents[2] / "deployments" / "runs" / "qwen3.6-27b.toml"
SERVER = {"mode": "server", "server_url": "http://127.0.0.1:8000", "server_folder": "/states"}
SPLIT = {"mode": "split", "target_ranks": 6, "drafter_ranks": 2}
WHOLE = 2 * 26_900_000_000


def check(available: int, topology: dict[str, Any], target_number: int | None) -> None:
    """Check a rank of the production run on a machine with so much free memory."""
    run = load_parameters(PlanRun, RECIPE, [], {})
    chosen = TopologyConfig(**topology)
    config = run.train.model_copy(update={"topology": chosen})
    assert run.target_shape is not None
    ready = Prepared(config, cast("Manifest", None), None, drafter_config(config, run.target_shape))
    shape = TargetShape(run.target_shape.num_parameters, 5120, 17408)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "host_memory", lambda: HostMemory(10**13, available))
        check_device(ready, shape, torch.device("cpu"), Seat(chosen, World(), target_number))


@pytest.mark.parametrize(
    ("topology", "number"), [(SERVER, None), (SPLIT | {"shard_target": True}, 0)], ids=["server", "spread"]
)
def test_a_target_that_passes_through_the_machine_must_fit_it(topology: dict[str, Any], number: int | None) -> None:
    check(WHOLE, topology, number)
    with pytest.raises(MemoryPlanError, match=r"The target has 53\.8 GB .* 33\.8 GB is free\. Free 20\.0 GB or more"):
        check(WHOLE - 20_000_000_000, topology, number)


@pytest.mark.parametrize(
    ("topology", "number"), [({}, None), (SPLIT, 0), (SPLIT | {"shard_target": True}, None)], ids=str
)
def test_other_ranks_need_no_room_for_it(topology: dict[str, Any], number: int | None) -> None:
    check(0, topology, number)
