"""Tiny drafters and packed rows for the tests of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dflash.model.attention import BlockLayout
from dflash.model.layout import DrafterConfig


def _tiny_config(**choices: object) -> DrafterConfig:
    fields: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 128,
        "block_size": 4,
        "mask_token_id": 49,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
    }
    return DrafterConfig.model_validate(fields | choices)


def _packed_layout(document_lengths: list[int], anchors: list[int]) -> BlockLayout:
    position = torch.cat([torch.arange(length) for length in document_lengths])
    document = torch.repeat_interleave(torch.arange(len(document_lengths)), torch.tensor(document_lengths))
    return BlockLayout(anchor_N=torch.tensor(anchors), position_S=position, document_S=document)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., DrafterConfig]:
    """Makes a drafter configuration of one sliding and one full layer."""
    return _tiny_config


@pytest.fixture(scope="session")
def packed_layout() -> Callable[[list[int], list[int]], BlockLayout]:
    """Makes the layout of a packed row from the lengths of its documents and its anchors' rows."""
    return _packed_layout
