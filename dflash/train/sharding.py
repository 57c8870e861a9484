"""The drafter spread over the ranks with FSDP2, and its state as if it weren't.

Replicated weights need 16 bytes a parameter on each rank (27.7 GB for the 1.73 B drafter); FSDP2 divides that by the
number of ranks. Checkpoints hold full tensors either way, so a run can go on with the other kind and at another world
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(drafter: nn.Module, precision: torch.dtype | None = None, mesh: DeviceMesh | None = None) -> None:
    """Shard a drafter's layers and the rest of it over the ranks, in place.

    Gradients are summed, not averaged: the step divides by the global weight.

    Args:
        drafter: with fp32 weights.
        precision: what the gathered weights compute in; gradients are reduced in fp32.
        mesh: the ranks; None for all.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    layers = drafter.layers
    assert isinstance(layers, nn.ModuleList)
    for module in (*layers, drafter):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # Without this a factor of 1 becomes a scaled reduction that only NCCL has.
        module.set_force_sum_reduction_for_comms(True)


def full_state(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return weights and optimiser state as full tensors on the CPU; all ranks must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: tuple[Any, Any] = get_state_dict(drafter, optimizer, options=options)
    return state


def load_full_state(
    drafter: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], state: dict[str, Any]
) -> None:
    """Take over what `full_state` gave, at any number of ranks; how updates are computed is decided here, not there."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    fused = optimizer.param_groups[0]["fused"]
    state = {**state, "param_groups": [{**group, "fused": fused} for group in state["param_groups"]]}
    set_state_dict(drafter, optimizer, model_state_dict=dict(weights), optim_state_dict=state, options=options)
