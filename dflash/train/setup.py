"""From a run's configuration and a target to a drafter that is ready to train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dflash.model.drafter import Drafter
from dflash.model.features import Target
from dflash.model.layout import DrafterConfig
from dflash.model.target_loading import find_final_norm, find_layers
from dflash.train.config import TrainConfig
from dflash.train.feature_source import TargetEnds
from dflash.train.seeds import named_generator
from dflash.train.sharding import shard
from dflash.train.world import World


def build_drafter(
    config: TrainConfig, network: DrafterConfig, target: Target | TargetEnds, world: World | None = None
) -> Drafter:
    """Build a drafter with fp32 weights on the target's device; the seed alone decides its weights.

    With `copy_target_norm` the final norm starts as the target's: the frozen head was trained behind it.

    Args:
        config: of the run.
        network: its layers.
        target: or what this rank has of it.
        world: the ranks that train; all by default.
    """
    device = target.embedding_VH.device
    attention = config.attention
    if attention == "auto":
        attention = "flex" if device.type == "cuda" else "sdpa"
    drafter = Drafter(network, attention, recompute=config.recompute)
    drafter.initialize(named_generator(f"{config.seed}/weights"))
    if config.copy_target_norm:
        scale_H = target.norm_scale_H if isinstance(target, TargetEnds) else norm_scale(target)
        with torch.no_grad():
            drafter.norm.weight.copy_(scale_H)
    drafter.to(device=device, dtype=torch.float32)
    world = World.current() if world is None else world
    if config.sharding == "fsdp" and world.size > 1:
        mesh = None if world.group is None else DeviceMesh.from_group(world.group, device.type)
        shard(drafter, torch.bfloat16 if device.type == "cuda" else None, mesh)
    return drafter


def ends_of(target: Target) -> TargetEnds:
    """Return the parts of a target that a drafter on another rank needs."""
    return TargetEnds(target.embedding_VH, target.head_VH, norm_scale(target))


def load_ends(load: Callable[[], Target], world: World, device: torch.device) -> TargetEnds:
    """Load a whole target for its ends alone, one rank after the other: the machine's memory holds one at a time.

    Args:
        load: on the CPU.
        world: the ranks that train; all must call this.
        device: where the ends go.
    """
    ends: TargetEnds | None = None
    for turn in range(world.size):
        if turn == world.rank:
            ends = ends_of(load()).to(device)
        world.barrier()
    assert ends is not None
    return ends


def norm_scale(target: Target) -> Tensor:
    """Return the factor [H] of the target's final norm, fp32; a norm that scales by 1 + weight is converted."""
    norm = find_final_norm(find_layers(target.model)[0])
    weight = norm.weight
    assert isinstance(weight, Tensor)
    probe = torch.ones(1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    # Running the norm over ones gives the factor that it applies, whatever way it stores it.
    with torch.inference_mode():
        scale_H: Tensor = norm(probe)[0]
    return scale_H.float().clone()
