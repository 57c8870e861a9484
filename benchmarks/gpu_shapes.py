"""Shapes and random inputs of the GPU check: a target, a drafter, packs, and the arithmetic of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Scale:
    """What is measured.

    Attributes:
        target: fields of a Qwen3 configuration; the default is Qwen3-8B's.
        drafter: choices of the drafter.
        pack_tokens: tokens of a step.
        row_tokens: tokens of a document in it.
        num_anchors: blocks of a step.
        steps: measured steps, behind two that compile and warm up.
    """

    target: dict[str, Any] = field(
        default_factory=lambda: {
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
        }
    )  # fmt: skip
    drafter: dict[str, Any] = field(
        default_factory=lambda: {"num_hidden_layers": 5, "block_size": 16, "sliding_window": 2048}
    )
    pack_tokens: int = 8192
    row_tokens: int = 2048
    num_anchors: int = 512
    steps: int = 8


TINY = Scale(
    {
        "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    },
    {"num_hidden_layers": 2, "block_size": 8, "sliding_window": 64}, pack_tokens=256, row_tokens=128, num_anchors=32,
    steps=2,
)  # fmt: skip


def random_target(scale: Scale, device: Any) -> Any:
    """A Qwen3 with random weights on the device, bf16 on CUDA."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(Qwen3Config(**scale.target, tie_word_embeddings=False))
    finally:
        torch.set_default_dtype(default)


def network_of(scale: Scale) -> Any:
    """The drafter's configuration for that target."""
    from transformers import Qwen3Config

    from dflash.model.layout import DrafterConfig

    mask = scale.target["vocab_size"] - 1
    count = 5 if scale.target["num_hidden_layers"] > 8 else 2
    return DrafterConfig.for_target(
        Qwen3Config(**scale.target), **scale.drafter, mask_token_id=mask, num_target_features=count
    )


def places(scale: Scale, device: Any) -> tuple[Any, Any, Any]:
    """Anchors, positions and documents of a full pack."""
    import torch

    count = scale.pack_tokens // scale.row_tokens
    position = torch.arange(scale.row_tokens, device=device).repeat(count)
    document = torch.arange(count, device=device).repeat_interleave(scale.row_tokens)
    anchor = torch.randperm(scale.pack_tokens - 1, device=device)[: scale.num_anchors].sort().values
    return anchor, position, document


def random_pack(scale: Scale, number: int) -> Any:
    """Rows of random ids, of lengths that change from step to step as real ones do."""
    import numpy as np

    from dflash.data.batches import BatchState, Pack
    from dflash.data.row_reader import Row

    random = np.random.default_rng(number)
    rows, left = [], scale.pack_tokens
    while left > 2:
        length = min(left, int(random.integers(scale.row_tokens // 2, scale.row_tokens + 1)))
        ids = random.integers(0, scale.target["vocab_size"] - 1, length, dtype=np.int32)
        rows.append(Row((number, len(rows)), ids, np.arange(length) > length // 8, str(len(rows)), "made"))
        left -= length
    return Pack(tuple(rows), number, 0, BatchState())


def target_numbers(target: Any, device: Any) -> Any:
    """The target as the preflight sees it."""
    from dflash.train.memory import TargetShape

    weights = list(target.model.parameters())
    text = target.text_config
    size = 2 if device.type == "cuda" else 4
    return TargetShape(sum(one.numel() for one in weights), text.hidden_size, text.intermediate_size, size)


def step_flops(scale: Scale, network: Any, target_parameters: int) -> float:
    """Multiply-adds twice, of matrices alone: the target's pass to its last feature layer, the drafter's three."""
    depth = (network.target_layer_ids[-1] + 1) / network.num_target_layers
    table = 2 * network.vocab_size * network.hidden_size
    target = 2 * (target_parameters - table) * depth * scale.pack_tokens
    block_tokens = scale.num_anchors * network.block_size
    hidden, head = network.hidden_size, network.head_dim
    query, shared = network.num_attention_heads * head, network.num_key_value_heads * head
    per_block = 2 * hidden * query + 3 * hidden * network.intermediate_size
    keys = (scale.pack_tokens + block_tokens) * 2 * hidden * shared
    layers = network.num_hidden_layers * (block_tokens * per_block + keys)
    context = scale.pack_tokens * network.feature_size * hidden
    logits = scale.num_anchors * network.num_draft_tokens * hidden * network.vocab_size
    return target + 6 * (layers + context) + 4 * logits
