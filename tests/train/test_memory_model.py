"""The byte model against the tensors of real steps, counted on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.tensor_peak import TensorPeak
from dflash.model import attention
from dflash.model.attention import BlockLayout
from dflash.model.drafter import Drafter, block_embeddings
from dflash.model.layout import DrafterConfig
from dflash.train.config import LossConfig, TrainConfig
from dflash.train.loss import block_loss, slot_targets
from dflash.train.memory import TargetShape, plan_memory

HIDDEN, INNER, VOCAB, TOKENS, BLOCK = 128, 384, 2048, 512, 8


class FlexTensors(torch.autograd.Function):
    """Keeps what flex attention keeps and computes nothing: it has no backward pass on a CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out, log_sum = torch.zeros_like(query), torch.zeros(query.shape[:2])
        ctx.save_for_backward(query, keys, values, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3])


def network(layers: int) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, rope_theta=1e6, max_position_embeddings=TOKENS,
        block_size=BLOCK, mask_token_id=1, target_layer_ids=tuple(range(5)), num_target_layers=9,
        layer_types=("full_attention",) * layers,
    )  # fmt: skip


def counted_peak(config: TrainConfig, drafter_config: DrafterConfig) -> int:
    """Bytes of tensors at the peak of one step behind the first, a target's embedding and head included."""
    dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
    with TensorPeak() as counter:
        drafter = Drafter(drafter_config, "flex", recompute=config.recompute)
        tables = [torch.zeros(VOCAB, HIDDEN, dtype=dtype) for _ in range(2)]
        optimizer = torch.optim.AdamW(drafter.parameters(), fused=True)
        for weight in drafter.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        counter.peak_bytes = counter.now_bytes
        ids_S, anchor_N = torch.arange(TOKENS), torch.arange(0, TOKENS - 1, TOKENS // config.num_anchors)
        layout = BlockLayout.single(anchor_N, TOKENS)
        features_SF = torch.zeros(TOKENS, drafter_config.feature_size, dtype=dtype)
        embeddings_NBH = block_embeddings(tables[0], ids_S, anchor_N, drafter_config)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden_NBH = drafter(features_SF, embeddings_NBH, layout)
        targets = slot_targets(ids_S, torch.ones(TOKENS, dtype=torch.bool), layout.document_S, anchor_N, BLOCK)
        loss = block_loss(hidden_NBH, tables[1], targets, config.loss.options(BLOCK))
        del hidden_NBH
        loss.numerator.backward()  # type: ignore[no-untyped-call]
        del loss
        optimizer.step()
    return counter.peak_bytes


@pytest.mark.parametrize(
    ("layers", "values"),
    [
        (3, {"precision": "bfloat16"}),
        (3, {"precision": "float32"}),
        (4, {"precision": "bfloat16", "recompute": True}),
        (2, {"precision": "bfloat16", "num_anchors": 16}),
    ],
)
def test_the_prediction_is_within_five_per_cent(
    monkeypatch: pytest.MonkeyPatch, layers: int, values: dict[str, Any]
) -> None:
    monkeypatch.setattr(attention, "_flex", lambda query, keys, values, _mask: FlexTensors.apply(query, keys, values))
    monkeypatch.setattr(attention.Attention, "_flex_mask", lambda *_: None)
    settings = {"pack_tokens": TOKENS, "num_anchors": 64, "loss": LossConfig(chunk_blocks=16)} | values
    config, drafter_config = TrainConfig.model_validate(settings), network(layers)
    size = 4 if config.precision == "float32" else 2
    shape = TargetShape(2 * VOCAB * HIDDEN, HIDDEN, INNER, size)
    plan = plan_memory(config, drafter_config, shape, environment_bytes=0)
    assert plan.total_bytes == pytest.approx(counted_peak(config, drafter_config), rel=0.05)
