"""What a step costs on each side, and the topology that follows; needs no torch.

Floating point operations of matrix products alone. Both sides run at about the same share of a device's peak: they are
made of the same large products.

In operations a colocated run can't be beaten: all devices are always busy, while a split is as slow as its slower
side. So a split is for what doesn't fit: it takes the target's weights off the devices that train, or the drafter's
states off those that run the target.

Legend: S tokens of a pack, T block tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash.model.layout import DrafterConfig, trainable_parameters
from dflash.train.config import TrainConfig
from dflash.train.memory import TargetShape, frozen_bytes, plan_memory
from dflash.train.topology import Role, TopologyConfig


@dataclass(frozen=True, slots=True)
class PackCost:
    """Operations for one pack.

    Attributes:
        target_flops: of the target's forward pass.
        drafter_flops: of the drafter's forward and backward pass.
    """

    target_flops: float
    drafter_flops: float


@dataclass(frozen=True, slots=True)
class TopologyOption:
    """One way to use the devices.

    Attributes:
        mode: of the topology.
        target_ranks: that run the target alone.
        drafter_ranks: that train.
        speed: packs a second, as a share of what the devices could do if none ever waited.
        bytes_of_role: planned on a device of each role.
        fits: whether all of these fit.
    """

    mode: str
    target_ranks: int
    drafter_ranks: int
    speed: float
    bytes_of_role: dict[Role, int]
    fits: bool

    def describe(self) -> str:
        """For people."""
        ranks = f"{self.target_ranks} target and {self.drafter_ranks} drafter ranks"
        where = f"colocated on {self.drafter_ranks} ranks" if self.mode == "colocated" else f"split, {ranks}"
        sizes = " and ".join(f"{size / 1e9:.1f} GB" for size in self.bytes_of_role.values())
        return f"{where}: {sizes} on each, {100 * self.speed:.0f} % of the ideal speed"


def cost_of_pack(config: TrainConfig, network: DrafterConfig, target: TargetShape) -> PackCost:
    """Count the operations of one pack."""
    hidden, layers = network.hidden_size, network.num_hidden_layers
    blocks = config.num_anchors * network.block_size
    depth = (network.target_layer_ids[-1] + 1) / network.num_target_layers
    body = target.num_parameters - frozen_bytes(network, target) // target.bytes_per_value
    project = network.feature_size * hidden
    keys = 2 * layers * hidden * network.num_key_value_heads * network.head_dim
    # Forward and backward take 6 operations a weight and token, and 2 more where the forward pass is made twice.
    passes = 8 if config.recompute else 6
    on_blocks = passes * (trainable_parameters(network) - project) * blocks
    on_context = passes * (project + keys) * config.pack_tokens
    seen = min(network.sliding_window or config.pack_tokens, config.pack_tokens) / 2
    attention = 2 * passes * layers * blocks * seen * network.num_attention_heads * network.head_dim
    slots = config.num_anchors * network.num_draft_tokens
    ids = min(config.loss_vocab_size or network.vocab_size, network.vocab_size)
    head = 4 * slots * hidden * ids  # frozen: nothing for a gradient of its weights
    return PackCost(2 * body * depth * config.pack_tokens, on_blocks + on_context + attention + head)


def topologies(
    config: TrainConfig, network: DrafterConfig, target: TargetShape, num_ranks: int, device_bytes: int | None
) -> list[TopologyOption]:
    """List the ways to use some devices: first those that fit, the fastest of them first.

    Args:
        config: of the run, whatever its own topology is.
        network: the drafter.
        target: of the run.
        num_ranks: devices.
        device_bytes: memory of each; None lets everything fit.
    """
    cost = cost_of_pack(config, network, target)
    whole = cost.target_flops + cost.drafter_flops
    choices = [TopologyConfig()]
    if not config.replay.max_bytes and not config.warm_start:
        choices += [
            TopologyConfig(mode="split", target_ranks=number, drafter_ranks=num_ranks - number)
            for number in range(1, num_ranks)
        ]
    found = []
    for choice in choices:
        changed = config.model_copy(update={"topology": choice})
        sizes = {
            role: plan_memory(changed, network, target, world_size=num_ranks, role=role).total_bytes
            for role in choice.roles
        }
        is_split = choice.mode == "split"
        targets, drafters = (choice.target_ranks, choice.drafter_ranks) if is_split else (0, num_ranks)
        slower = min(targets / cost.target_flops, drafters / cost.drafter_flops) if is_split else num_ranks / whole
        fits = device_bytes is None or max(sizes.values()) <= device_bytes
        found.append(TopologyOption(choice.mode, targets, drafters, slower * whole / num_ranks, sizes, fits))
    return sorted(found, key=lambda one: (not one.fits, -one.speed))
