from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from dflash.data.batches import LocalShards
from dflash.model.drafter import Drafter
from dflash.model.layout import DrafterConfig
from dflash.train.config import OptimizerConfig, TrainConfig

VOCAB, HIDDEN, LAYERS = 37, 16, 2


class TinyTarget:
    """A frozen stand-in for a target: features are causal running means of embeddings, so they carry the context."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        self.embedding_VH = torch.randn(VOCAB, HIDDEN, generator=g)
        self.head_VH = torch.randn(VOCAB, HIDDEN, generator=g)
        self.calls = 0
        self.poison: set[int] = set()
        self.out_of_memory_above: int | None = None

    def features(self, input_ids_S: Tensor, position_S: Tensor, document_S: Tensor) -> Tensor:
        self.calls += 1
        if self.out_of_memory_above is not None and len(input_ids_S) > self.out_of_memory_above:
            raise torch.OutOfMemoryError("simulated")
        x_SH = self.embedding_VH[input_ids_S]
        same_SS = (document_S[:, None] == document_S) & (position_S[:, None] >= position_S)
        mean_SH = (same_SS.float() / same_SS.sum(dim=1, keepdim=True)) @ x_SH
        features_SF = torch.cat([x_SH, mean_SH], dim=1)
        for token in self.poison:
            features_SF[input_ids_S == token] = float("nan")
        return features_SF

    def features_and_final(self, input_ids_S: Tensor, position_S: Tensor, document_S: Tensor) -> tuple[Tensor, Tensor]:
        features_SF = self.features(input_ids_S, position_S, document_S)
        return features_SF, features_SF[:, :HIDDEN]


def tiny_config(block_size: int = 4) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        rope_theta=10_000.0,
        max_position_embeddings=256,
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=(0, 1),
        num_target_layers=LAYERS,
        layer_types=("full_attention",),
    )


def write_rows(path: Path, rows: Sequence[Sequence[int]], prompt: int = 2) -> Path:
    masks = [[place >= prompt for place in range(len(row))] for row in rows]
    table = pa.table(
        {
            "input_ids": pa.array([list(row) for row in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.list_(pa.bool_())),
            "sample_id": [f"{path.stem}-{row}" for row in range(len(rows))],
            "source": ["made"] * len(rows),
        }
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def config(**fields: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "pack_tokens": 40,
        "num_anchors": 6,
        "num_epochs": 3,
        "checkpoint_every": 1000,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
    }
    return TrainConfig(**base | fields)


@pytest.fixture
def target() -> TinyTarget:
    return TinyTarget()


@pytest.fixture
def make_drafter() -> Callable[[], Drafter]:
    def make() -> Drafter:
        drafter = Drafter(tiny_config())
        drafter.initialize(torch.Generator().manual_seed(1))
        return drafter

    return make


@pytest.fixture
def source(tmp_path: Path) -> LocalShards:
    g = np.random.default_rng(3)
    shards = [[g.integers(1, VOCAB, g.integers(8, 24)).tolist() for _ in range(6)] for _ in range(2)]
    return LocalShards.scan([write_rows(tmp_path / f"shard{index}.arrow", rows) for index, rows in enumerate(shards)])
