"""What a training run will need, before anything is loaded: memory of the device, storage, tokens.

A byte model: each part is a product of sizes with the number of bytes that the code keeps for it. Nothing here
allocates tensors. Decimal units (1 GB = 1e9 bytes), as devices are sold.

Legend: P trainable parameters, S tokens of a pack, N anchors of a pack, B slots of a block, T = N*B block tokens, L =
    B-1 predicted slots, H hidden size, I width of the MLP, K target layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash.errors import MemoryPlanError
from dflash.model.layout import DrafterConfig, trainable_parameters
from dflash.train.config import TrainConfig

# fp32 weights, fp32 gradients, two fp32 moments of AdamW.
WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8

# CUDA context, cuBLAS workspaces and what the caching allocator can't use; a measurement replaces it.
DEFAULT_ENVIRONMENT_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What the model of memory needs to know of the target.

    Attributes:
        num_parameters: of the text model, embedding and head included.
        hidden_size: H.
        intermediate_size: of its MLP; of the active experts where it has experts.
        bytes_per_value: 2 for bfloat16, 4 for float32.
    """

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    bytes_per_value: int = 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one rank.

    Attributes:
        parts: by name, in the order in which they appear.
    """

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that saves memory.

    Attributes:
        setting: its name in the run's configuration.
        before: value.
        after: value.
        saved_bytes: on each rank.
        fits: whether it is enough alone.
    """

    setting: str
    before: str
    after: str
    saved_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """Why features are never stored.

    Attributes:
        bytes_per_token: of features.
        offline_bytes: to store the features of a whole dataset.
        online_bytes: that a pack takes in memory.
        target_flops: of the forward passes of one epoch.
    """

    bytes_per_token: int
    offline_bytes: int
    online_bytes: int
    target_flops: float


def feature_bytes_per_token(network: DrafterConfig, bytes_per_value: int = 2) -> int:
    """Return the bytes of one token's features: 51,200 for 5 layers of 5,120 in bfloat16."""
    return network.feature_size * bytes_per_value


def optimizer_bytes(network: DrafterConfig) -> int:
    """Return weights, gradients and AdamW state in fp32: 27.7 GB for the 1.730 B drafter."""
    return trainable_parameters(network) * (WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES)


def plan_memory(
    config: TrainConfig,
    network: DrafterConfig,
    target: TargetShape,
    *,
    world_size: int = 1,
    environment_bytes: int = DEFAULT_ENVIRONMENT_BYTES,
) -> MemoryPlan:
    """Add up what one rank holds at the peak of a step, in the backward pass behind the loss.

    Args:
        config: packs, anchors, chunks, sharding.
        network: the drafter.
        target: on the same device (colocated topology).
        world_size: ranks; only FSDP makes the drafter's part smaller.
        environment_bytes: what CUDA and the allocator take beside tensors.
    """
    ranks = world_size if config.sharding == "fsdp" else 1
    parameters = trainable_parameters(network)
    low = config.precision != "float32"
    block_tokens = config.num_anchors * network.block_size
    slots = config.num_anchors * network.num_draft_tokens
    return MemoryPlan(
        {
            "target weights": target.num_parameters * target.bytes_per_value,
            "drafter weights": parameters * WEIGHT_BYTES // ranks,
            "gradients": parameters * GRADIENT_BYTES // ranks,
            "optimizer": parameters * MOMENT_BYTES // ranks,
            "autocast copies": parameters * 2 if low else 0,
            "features": config.pack_tokens * feature_bytes_per_token(network, target.bytes_per_value),
            "drafter activations": _activation_bytes(config, network, block_tokens),
            "logits chunk": _logits_bytes(config, network, low),
            "hidden gradient": slots * network.hidden_size * (2 if low else 4),
            "target forward": _target_forward_bytes(config, target),
            "replay": config.replay.max_bytes,
            "environment": environment_bytes,
        }
    )


def plan_storage(
    config: TrainConfig, network: DrafterConfig, target: TargetShape, num_rows: int, tokens_per_row: float
) -> StoragePlan:
    """Compare storing all features with computing them: 902 thousand rows of 2,000 tokens are about 90 TB."""
    per_token = feature_bytes_per_token(network, target.bytes_per_value)
    tokens = num_rows * tokens_per_row
    depth = (network.target_layer_ids[-1] + 1) / network.num_target_layers
    return StoragePlan(
        per_token, round(tokens * per_token), config.pack_tokens * per_token, 2 * target.num_parameters * depth * tokens
    )


def check_memory(
    config: TrainConfig,
    network: DrafterConfig,
    target: TargetShape,
    device_bytes: int,
    *,
    world_size: int = 1,
    environment_bytes: int = DEFAULT_ENVIRONMENT_BYTES,
) -> MemoryPlan:
    """Return the plan if it fits the device.

    Raises:
        MemoryPlanError: it doesn't; the message lists the parts and what to change by how much.
    """

    def plan(changed: TrainConfig) -> MemoryPlan:
        return plan_memory(changed, network, target, world_size=world_size, environment_bytes=environment_bytes)

    planned = plan(config)
    if planned.total_bytes <= device_bytes:
        return planned
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in planned.parts.items() if size)
    changes = suggest(config, plan, device_bytes, world_size)
    advice = "; ".join(
        f"{one.setting} {one.before} -> {one.after} saves {_gb(one.saved_bytes)}{' and fits' if one.fits else ''}"
        for one in changes
    )
    raise MemoryPlanError(
        f"The run needs {_gb(planned.total_bytes)} on each device, which has {_gb(device_bytes)}: {parts}. "
        f"What to change: {advice or 'nothing in this configuration is large enough; take a larger device'}."
    )


def suggest(
    config: TrainConfig, plan: Callable[[TrainConfig], MemoryPlan], device_bytes: int, world_size: int
) -> list[Suggestion]:
    """List the smallest sufficient change of each setting, or its largest where none is sufficient."""
    total = plan(config).total_bytes
    found: list[Suggestion] = []
    for setting, values in _alternatives(config, world_size).items():
        for place, (shown, changed) in enumerate(values):
            needed = plan(changed).total_bytes
            if needed > device_bytes and place < len(values) - 1:
                continue
            if needed < total:
                before = _shown(config, setting)
                found.append(Suggestion(setting, before, shown, total - needed, needed <= device_bytes))
            break
    return sorted(found, key=lambda one: (not one.fits, -one.saved_bytes))


def _alternatives(config: TrainConfig, world_size: int) -> dict[str, list[tuple[str, TrainConfig]]]:
    """Settings that save memory, each with its values from mild to strong."""

    def halvings(start: int, low: int) -> list[int]:
        return [value for power in range(1, 12) if (value := start >> power) >= low]

    chunks = [
        (str(blocks), config.model_copy(update={"loss": config.loss.model_copy(update={"chunk_blocks": blocks})}))
        for blocks in halvings(config.loss.chunk_blocks, 1)
    ]
    changes = {
        "loss.chunk_blocks": chunks,
        "recompute": [] if config.recompute else [("true", config.model_copy(update={"recompute": True}))],
        "num_anchors": [
            (str(anchors), config.model_copy(update={"num_anchors": anchors}))
            for anchors in halvings(config.num_anchors, 32)
        ],
        "pack_tokens": [
            (str(tokens), config.model_copy(update={"pack_tokens": tokens}))
            for tokens in halvings(config.pack_tokens, 512)
        ],
    }
    if world_size > 1 and config.sharding != "fsdp":
        changes["sharding"] = [("fsdp", config.model_copy(update={"sharding": "fsdp"}))]
    return changes


def _shown(config: TrainConfig, setting: str) -> str:
    value: object = config
    for name in setting.split("."):
        value = getattr(value, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _activation_bytes(config: TrainConfig, network: DrafterConfig, block_tokens: int) -> int:
    """Tensors that the drafter keeps for its backward pass, by the code of its layers.

    Under autocast norms work in fp32 (4 bytes and a rounded copy of 2), and each linear layer keeps a 2-byte copy of
    its input.
    """
    low = config.precision != "float32"
    hidden = network.hidden_size
    query = network.num_attention_heads * network.head_dim
    shared = network.num_key_value_heads * network.head_dim
    # One key/value token: inputs of k_proj and v_proj, k with its norm and rotation, v.
    per_key = hidden * 4 + shared * (18 if low else 20)
    # One block token: two norms, inputs of q, gate and up; q with norm, rotation, attention; four MLP tensors.
    per_query = query * (14 if low else 20)
    per_block = hidden * (18 if low else 20) + per_query + network.intermediate_size * (8 if low else 16)
    layer = (config.pack_tokens + block_tokens) * per_key + block_tokens * per_block
    kept = block_tokens * hidden * (2 if low else 4) if config.recompute else layer
    context = config.pack_tokens * hidden * (10 if low else 12)
    inner = network.num_hidden_layers - (0 if config.recompute else 1)
    return context + layer + inner * kept


def _logits_bytes(config: TrainConfig, network: DrafterConfig, low: bool) -> int:
    """A chunk's logits: the product in 2 bytes beside its fp32 copy; KL holds the target's and one temporary more."""
    ids = min(config.draft_vocab_size or network.vocab_size, network.vocab_size)
    logits = min(config.loss.chunk_blocks, config.num_anchors) * network.num_draft_tokens * ids
    per_logit = 6 if low else 4
    return logits * (per_logit + 12 if config.loss.objective == "kl" else per_logit)


def _target_forward_bytes(config: TrainConfig, target: TargetShape) -> int:
    """Without gradients one layer's tensors exist: residual, norm, attention's in- and outputs, and the MLP's three."""
    per_token = 8 * target.hidden_size + 3 * target.intermediate_size
    return config.pack_tokens * per_token * target.bytes_per_value


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
