"""The run model of a training run: flow parameters, TOML file and checkpoint share it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dflash.config import RunModel
from dflash.train.loss_options import LossOptions, Objective, Weighting
from dflash.train.topology import TopologyConfig

# Paper, section 4.2: the decay that was tuned for each block size; sizes between them are interpolated.
_GAMMA_OF_BLOCK = ((8, 4.0), (10, 5.0), (16, 7.0))


class DrafterChoices(RunModel):
    """What may be chosen about the drafter's network; all else follows the target."""

    num_hidden_layers: int = Field(default=5, ge=1, description="Draft layers.")
    block_size: int = Field(default=16, ge=2, description="Slots of a block; it drafts one token fewer.")
    num_target_features: int = Field(default=5, ge=1, description="Target layers whose outputs feed the drafter.")
    target_layer_ids: tuple[int, ...] | None = Field(
        default=None, description="0-based layers in place of the default."
    )
    sliding_window: int | None = Field(default=None, ge=1, description="Window of all layers but the last.")
    intermediate_size: int | None = Field(default=None, ge=1, description="Width of the MLP; default the target's.")
    num_attention_heads: int | None = Field(default=None, ge=1, description="Query heads; default the target's.")
    num_key_value_heads: int | None = Field(default=None, ge=1, description="Key/value heads; default the target's.")
    head_dim: int | None = Field(default=None, ge=2, description="Size of one head; default the target's.")
    mask_token_id: int | None = Field(default=None, ge=0, description="Id that fills the predicted slots.")

    def chosen(self) -> dict[str, Any]:
        """Return the fields that differ from 'follow the target', as `DrafterConfig.for_target` takes them."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class LossConfig(RunModel):
    """What is minimised."""

    objective: Objective = Field(default="cross_entropy", description="`kl` also runs the target's last layers.")
    weighting: Weighting = Field(default="decay", description="Fixed decay along the block, or D-PACE.")
    gamma: float | None = Field(default=None, gt=0, description="Decay; default by block size (7 for 16, 4 for 8).")
    alpha: float = Field(default=0.5, gt=0, le=1, description="Smoothing of D-PACE.")
    chunk_blocks: int = Field(default=32, ge=1, description="Blocks whose logits are in memory at once.")

    def options(self, block_size: int) -> LossOptions:
        """Return the options for one block size."""
        gamma = self.gamma or default_gamma(block_size)
        return LossOptions(self.objective, self.weighting, gamma, self.alpha, self.chunk_blocks)


class OptimizerConfig(RunModel):
    """AdamW with clipping and a cosine schedule."""

    learning_rate: float = Field(default=6e-4, gt=0, le=10, description="Peak of the schedule.")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Of the matrices; norms never decay.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the second moment.")
    clip_norm: float = Field(default=1.0, gt=0, description="Largest global gradient norm.")
    warmup_share: float = Field(default=0.04, ge=0, lt=1, description="Share of the run that warms up linearly.")
    final_share: float = Field(default=0.0, ge=0, le=1, description="Share of the peak that the cosine ends at.")


class ReplayConfig(RunModel):
    """Features kept in memory, for machines where the target's forward pass is most of the cost; one rank only."""

    max_bytes: int = Field(default=0, ge=0, description="Memory for features; 0 turns replay off.")
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="How kept features are stored.")
    steps: int = Field(default=0, ge=0, description="Extra optimiser steps on kept rows after each fresh one.")
    in_background: bool = Field(
        default=False,
        description="Run the target on the next fresh pack while these steps are made: two threads, with half of the "
        "cores each; for CPUs.",
    )


class TrainConfig(RunModel):
    """A whole training run."""

    drafter: DrafterChoices = Field(default=DrafterChoices(), description="The network.")
    loss: LossConfig = Field(default=LossConfig(), description="The objective.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="AdamW and its schedule.")
    replay: ReplayConfig = Field(default=ReplayConfig(), description="Bounded replay of features.")
    topology: TopologyConfig = Field(default=TopologyConfig(), description="Which ranks run the target.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of the initial weights, the order and the anchors.")
    pack_tokens: int = Field(default=8192, ge=2, description="Token budget of a micro-batch.")
    window_rows: int = Field(default=256, ge=1, description="Rows packed against each other.")
    num_anchors: int = Field(default=512, ge=1, description="Blocks of a micro-batch, drawn anew each time.")
    accumulation: int = Field(default=1, ge=1, description="Micro-batches of a step on each rank.")
    num_epochs: int | None = Field(default=6, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(default=None, ge=1, description="Optimiser steps at most.")
    max_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Wall clock of the steps at most, resumed ones included; the schedule then depends on speed.",
    )
    loss_vocab_size: int | None = Field(
        default=None,
        ge=8,
        description="Ids that a step's loss looks at: the commonest, the step's own labels, and a random sample that "
        "stands for all others. Makes steps cheap where the head costs most; the drafter still drafts any id.",
    )
    warm_start: bool = Field(
        default=False,
        description="Begin at the frequencies of the written tokens and with heads that look at the nearest ones: "
        "spares a run of minutes its first thousand steps.",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Autocast of the drafter; `auto` is bfloat16 on CUDA. Weights are always fp32."
    )
    attention: Literal["auto", "dense", "sdpa", "flex"] = Field(default="auto", description="`auto`: flex on CUDA.")
    sharding: Literal["replicate", "fsdp"] = Field(default="replicate", description="Of the drafter over the ranks.")
    recompute: bool = Field(default=False, description="Recompute the drafter's layers in the backward pass.")
    copy_target_norm: bool = Field(default=True, description="Start the final norm from the target's.")
    ramp_up: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Begin with the heaviest packs there can be, whose result is dropped, so that memory runs out in "
        "the first minute or never; `auto`: on GPUs.",
    )
    max_skipped_rows: int = Field(default=100, ge=0, description="Non-finite rows that are left out before it stops.")
    checkpoint_every: int = Field(default=1000, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(default=3, ge=1, description="Newest checkpoints that are kept.")
    accept_env_change: bool = Field(default=False, description="Resume although torch, CUDA or packages changed.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse runs without an end, and replay settings that do nothing."""
        if self.num_epochs is None and self.max_steps is None and self.max_seconds is None:
            raise ValueError("set num_epochs, max_steps or max_seconds: without one the run has no end and no schedule")
        if self.replay.steps and not self.replay.max_bytes:
            raise ValueError("replay.steps needs replay.max_bytes: there is nothing to replay from")
        if self.loss_vocab_size is not None and self.loss.objective == "kl":
            raise ValueError("kl compares whole distributions: leave loss_vocab_size out, or use cross_entropy")
        if self.warm_start and self.sharding == "fsdp":
            raise ValueError("warm_start changes whole weights: use sharding replicate, or turn warm_start off")
        if self.replay.in_background and not self.replay.max_bytes:
            raise ValueError("replay.in_background needs replay.max_bytes: features wait in that memory")
        if self.topology.mode != "colocated" and (self.replay.max_bytes or self.warm_start):
            raise ValueError(
                "replay and warm_start are for short runs on one machine: use topology.mode colocated, or turn them off"
            )
        if self.topology.mode == "server" and self.loss.objective == "kl":
            raise ValueError(
                "a server gives no final states, which kl needs: use cross_entropy, or topology.mode split"
            )
        if self.ramp_up == "on" and self.replay.max_bytes:
            raise ValueError("ramp_up would fill the memory of replay with made-up rows: turn one of them off")
        if self.replay.max_bytes and self.loss.objective == "kl":
            raise ValueError("replay keeps features, not the target's final states that kl needs: use cross_entropy")
        return self


def default_gamma(block_size: int) -> float:
    """Return the decay for a block size: 4 at 8, 5 at 10, 7 at 16, linear between and held outside."""
    sizes = [size for size, _ in _GAMMA_OF_BLOCK]
    if block_size <= sizes[0]:
        return _GAMMA_OF_BLOCK[0][1]
    for (low, gamma_low), (high, gamma_high) in pairwise(_GAMMA_OF_BLOCK):
        if block_size <= high:
            return gamma_low + (gamma_high - gamma_low) * (block_size - low) / (high - low)
    return _GAMMA_OF_BLOCK[-1][1]
