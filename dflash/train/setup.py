"""From a run's configuration and a target to a drafter that is ready to train."""

from __future__ import annotations

import torch

from dflash.model.drafter import Drafter
from dflash.model.features import Target
from dflash.model.layout import DrafterConfig
from dflash.model.target_loading import find_final_norm, find_layers
from dflash.train.config import TrainConfig
from dflash.train.seeds import named_generator
from dflash.train.sharding import shard
from dflash.train.world import World


def build_drafter(config: TrainConfig, network: DrafterConfig, target: Target) -> Drafter:
    """Build a drafter with fp32 weights on the target's device; the seed alone decides its weights.

    With `copy_target_norm` the final norm starts as the target's: the frozen head was trained behind it.
    """
    attention = config.attention
    if attention == "auto":
        attention = "flex" if target.device.type == "cuda" else "sdpa"
    drafter = Drafter(network, attention, recompute=config.recompute)
    drafter.initialize(named_generator(f"{config.seed}/weights"))
    if config.copy_target_norm:
        copy_final_norm(drafter, target)
    drafter.to(device=target.device, dtype=torch.float32)
    if config.sharding == "fsdp" and World.current().size > 1:
        shard(drafter, torch.bfloat16 if target.device.type == "cuda" else None)
    return drafter


def copy_final_norm(drafter: Drafter, target: Target) -> None:
    """Set the drafter's final norm to the target's; a norm that scales by 1 + weight is converted."""
    norm = find_final_norm(find_layers(target.model)[0])
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    probe = torch.ones(1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    # Running the norm over ones gives the factor that it applies, whatever way it stores it.
    with torch.inference_mode():
        scale = norm(probe)[0]
    with torch.no_grad():
        drafter.norm.weight.copy_(scale.float().clone())
