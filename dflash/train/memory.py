"""What a training run will need, before anything is loaded: memory of the device, storage, tokens.

A byte model: each part is a product of sizes with the number of bytes that the code keeps for it. Nothing here
allocates tensors. Decimal units (1 GB = 1e9 bytes), as devices are sold.

A step has three peaks, and a plan is the highest: the target's pass; the drafter's backward pass, when all activations
are there and, unless micro-batches accumulate, no gradient yet; and the optimiser's update, when all gradients are
there and no activation. Counted on a CPU with the tensors of real steps (`tests/train/test_memory_model.py`) the model
is within 5 %.

Legend: P trainable parameters, S tokens of a pack, N anchors of a pack, B slots of a block, T = N*B block tokens, L =
    B-1 predicted slots, H hidden size, I width of the MLP, K target layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash.model.layout import DrafterConfig, trainable_parameters
from dflash.train.config import ReplayConfig, TrainConfig
from dflash.train.topology import Role

# fp32 weights, fp32 gradients, two fp32 moments of AdamW.
WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8

# cuBLAS workspaces and what the caching allocator can't use: they come with the first steps.
ALLOCATOR_BYTES = 1_500_000_000
# With the CUDA context, which a run measures before it loads anything (`dflash.train.job`).
DEFAULT_ENVIRONMENT_BYTES = 500_000_000 + ALLOCATOR_BYTES


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
        parts: what is there at the peak, by name.
        peak: when that is: `target pass`, `backward pass` or `update`.
    """

    parts: dict[str, int]
    peak: str

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


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


def seen_by_device(config: TrainConfig, *, on_gpu: bool) -> TrainConfig:
    """Return the run as the memory of its device sees it.

    Features that are kept for replay lie in the host's memory: beside a GPU they are none of its bytes, on a CPU they
    are. And `auto` precision is float32 on a CPU.
    """
    if on_gpu:
        return config.model_copy(update={"replay": ReplayConfig()})
    precision = "float32" if config.precision == "auto" else config.precision
    return config.model_copy(update={"precision": precision})


def feature_bytes_per_token(network: DrafterConfig, bytes_per_value: int = 2) -> int:
    """Return the bytes of one token's features: 51,200 for 5 layers of 5,120 in bfloat16."""
    return network.feature_size * bytes_per_value


def optimizer_bytes(network: DrafterConfig) -> int:
    """Return weights, gradients and AdamW state in fp32: 27.7 GB for the 1.730 B drafter."""
    return trainable_parameters(network) * (WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES)


def frozen_bytes(network: DrafterConfig, target: TargetShape) -> int:
    """Return the bytes of the target's embedding and head, which the drafter shares with it."""
    tensors = 1 if network.tie_word_embeddings else 2
    return tensors * network.vocab_size * network.hidden_size * target.bytes_per_value


def plan_memory(
    config: TrainConfig,
    network: DrafterConfig,
    target: TargetShape,
    *,
    world_size: int = 1,
    environment_bytes: int = DEFAULT_ENVIRONMENT_BYTES,
    role: Role = "colocated",
) -> MemoryPlan:
    """Add up what one rank holds at the highest peak of a step.

    Args:
        config: packs, anchors, chunks, sharding, replay, as the device sees it (`seen_by_device`).
        network: the drafter.
        target: of the run.
        world_size: ranks of a colocated run; only FSDP makes the drafter's part smaller.
        environment_bytes: what CUDA and the allocator take beside tensors.
        role: what the rank does.
    """
    topology, packs = config.topology, 1
    trainers = topology.drafter_ranks if topology.mode == "split" else world_size
    parameters = trainable_parameters(network) // (trainers if config.sharding == "fsdp" else 1)
    always: dict[str, int] = {}
    if role == "drafter":
        always["target's embedding and head"] = frozen_bytes(network, target)
        packs = config.accumulation if topology.mode == "split" else 1  # a step may begin anew, so its packs stay
    else:
        always["target weights"] = _target_weight_bytes(config, network, target)
    if role == "target":
        packs = 1 + _waiting_packs(config)
    else:
        always |= {"drafter weights": parameters * WEIGHT_BYTES, "optimizer": parameters * MOMENT_BYTES}
        always["replay"] = config.replay.max_bytes
    always["environment"] = environment_bytes
    gradients = {"gradients": parameters * GRADIENT_BYTES}
    kept = gradients if config.accumulation > 1 and role != "target" else {}
    features = {"features": packs * config.pack_tokens * feature_bytes_per_token(network, target.bytes_per_value)}
    peaks = {
        "target pass": {**kept, **features, "target forward": _target_forward_bytes(config, target)},
        "backward pass": {**kept, **features, **_backward_parts(config, network)},
        "update": gradients,  # fused: no temporaries
    }
    happen = {"target": ["target pass"], "drafter": ["backward pass", "update"]}.get(role, list(peaks))
    peak = max(happen, key=lambda name: sum(peaks[name].values()))
    return MemoryPlan(always | peaks[peak], peak)


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


def _target_weight_bytes(config: TrainConfig, network: DrafterConfig, target: TargetShape) -> int:
    """The whole target; spread over ranks, this one's share, the layer that runs and the one that is fetched."""
    whole = target.num_parameters * target.bytes_per_value
    if not config.topology.shard_target:
        return whole
    layer = (whole - frozen_bytes(network, target)) // network.num_target_layers
    return whole // config.topology.target_ranks + 2 * layer + frozen_bytes(network, target)


def _waiting_packs(config: TrainConfig) -> int:
    """Packs whose features wait in a target rank: all that its drafter ranks may ask for."""
    topology = config.topology
    asked = (topology.lookahead(config.accumulation) + config.accumulation) * topology.drafter_ranks
    return -(-asked // topology.target_ranks)


def _backward_parts(config: TrainConfig, network: DrafterConfig) -> dict[str, int]:
    """What the drafter's pass holds beside the features when its backward pass begins."""
    low = config.precision != "float32"
    size = 2 if low else 4
    block_tokens = config.num_anchors * network.block_size
    slots = config.num_anchors * network.num_draft_tokens
    layers = network.num_hidden_layers
    copies = trainable_parameters(network) * 2 if low else 0
    one, inner = _activation_bytes(config, network, block_tokens)
    parts = {"hidden gradient": slots * network.hidden_size * size}
    # The loss is done with its logits before the MLP's gradients begin to come.
    mlp = 3 * block_tokens * network.intermediate_size * size + network.hidden_size * network.intermediate_size * size
    logits = _logits_bytes(config, network, low)
    parts |= {"logits chunk": logits} if logits > mlp else {"gradients of an MLP": mlp}
    if not config.recompute:
        return {"drafter activations": one + inner, "autocast copies": copies, **parts}
    # Recomputed, a layer's activations and copies come either first, when all layers' inputs are there, or last, when
    # the gradients of the layers behind it are.
    behind = trainable_parameters(network) * GRADIENT_BYTES * (layers - 1) // layers
    if config.accumulation > 1 or inner > behind:
        return {"drafter activations": one + inner, "autocast copies": copies // layers, **parts}
    return {"drafter activations": one, "autocast copies": copies // layers, "gradients": behind, **parts}


def _activation_bytes(config: TrainConfig, network: DrafterConfig, block_tokens: int) -> tuple[int, int]:
    """Tensors that the drafter keeps for its backward pass, by the code of its layers: of one layer, of the others.

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
    return context + layer, inner * kept


def _logits_bytes(config: TrainConfig, network: DrafterConfig, low: bool) -> int:
    """A chunk's logits: the product in 2 bytes beside its fp32 copy; KL holds the target's and one temporary more."""
    ids = min(config.loss_vocab_size or network.vocab_size, network.vocab_size)
    logits = min(config.loss.chunk_blocks, config.num_anchors) * network.num_draft_tokens * ids
    per_logit = 6 if low else 4
    return logits * (per_logit + 12 if config.loss.objective == "kl" else per_logit)


def _target_forward_bytes(config: TrainConfig, target: TargetShape) -> int:
    """Without gradients one layer's tensors exist: residual, norm, attention's in- and outputs, and the MLP's three."""
    per_token = 8 * target.hidden_size + 3 * target.intermediate_size
    return config.pack_tokens * per_token * target.bytes_per_value
