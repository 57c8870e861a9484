"""The preflight of a rank on its device, before anything is on it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from dflash.train.config import TrainConfig
from dflash.train.host_memory import host_memory
from dflash.train.memory import ALLOCATOR_BYTES, MemoryPlan, TargetShape, plan_memory, seen_by_device
from dflash.train.memory_watch import MemoryWatch
from dflash.train.preflight import Prepared
from dflash.train.savings import check_host_holds, check_host_memory, check_plan
from dflash.train.seats import Seat
from dflash.train.topology import TopologyConfig

log = logging.getLogger(__name__)

_CPU_ENVIRONMENT_BYTES = 500_000_000


def check_device(ready: Prepared, shape: TargetShape, device: torch.device, seat: Seat) -> MemoryWatch:
    """Check that this rank's part of the run fits its device.

    Args:
        ready: the run.
        shape: of the target as it is loaded.
        device: of the rank.
        seat: what the rank does.

    Returns:
        What measures the rank against its plan.

    Raises:
        MemoryPlanError: it doesn't fit; the message says what to change by how much.
    """
    on_gpu = device.type == "cuda"
    host = host_memory()
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else host.total_bytes
    config, outside = seen_by_device(ready.config, on_gpu=on_gpu), _outside_bytes(device)
    if on_gpu:
        check_host_memory(ready.config.replay.max_bytes, host.available_bytes)
    if _passes_through_host(ready.config.topology, seat):
        check_host_holds(shape.num_parameters * shape.bytes_per_value, host.available_bytes)

    def plan(changed: TrainConfig) -> MemoryPlan:
        size, taken = seat.trainers.size, outside + (ALLOCATOR_BYTES if on_gpu else _CPU_ENVIRONMENT_BYTES)
        return plan_memory(changed, ready.network, shape, world_size=size, environment_bytes=taken, role=seat.role)

    planned = check_plan(config, plan, total, seat.trainers.size)
    log.info("memory: %.1f GB of %.1f GB planned on %s (%s)", planned.total_bytes / 1e9, total / 1e9, device, seat.role)
    return MemoryWatch(device, planned.total_bytes, outside)


def target_shape(text_config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> TargetShape:
    """Count a target's parameters by its architecture, without memory for them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config, trust_remote_code=trust_remote_code)
    return TargetShape(
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        hidden_size=int(text_config.hidden_size),
        intermediate_size=int(getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size),
        bytes_per_value=dtype.itemsize,
    )


def _passes_through_host(topology: TopologyConfig, seat: Seat) -> bool:
    """Whether this rank loads the whole target into the machine's memory, to keep a part of it."""
    return topology.mode == "server" or (topology.shard_target and seat.role == "target")


def _outside_bytes(device: torch.device) -> int:
    """What isn't this run's tensors: on CUDA the context and other processes, measured."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
