"""The `config.json` of the speculators library's DFlash model, and back.

It names target layers by the index of `hidden_states`, where 0 is the embedding's output: our layer id plus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dflash.errors import ModelError
from dflash.model.layout import DrafterConfig

SPECULATORS_VERSION = "0.9.0"  # the release whose files these are


class Verifier(BaseModel):
    """The target as the speculators layout names it; its readers fetch the embedding and the head from there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name_or_path: str = Field(min_length=1, description="Hugging Face id or folder of the target.")
    architectures: tuple[str, ...] = Field(description="`architectures` of the target's config.json.")


def to_speculators(config: DrafterConfig, verifier: Verifier, dtype: str) -> dict[str, Any]:
    """The configuration file of the speculators layout."""
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": verifier.model_dump(mode="json"),
        },
        "transformer_layer_config": {"model_type": "qwen3", **config.transformer_fields()},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def from_speculators(config: Mapping[str, Any]) -> DrafterConfig:
    """Read a configuration file of the speculators layout.

    Raises:
        ModelError: it describes a drafter that this network can't run.
    """
    layer_config, ids = config.get("transformer_layer_config"), config.get("aux_hidden_state_layer_ids")
    if not isinstance(layer_config, Mapping) or not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ModelError("config.json: expected transformer_layer_config and aux_hidden_state_layer_ids of speculators")
    expected = {
        "speculators_model_type": "dflash",
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "draft_vocab_size": layer_config.get("vocab_size"),
    }
    wrong = {name: config[name] for name, value in expected.items() if name in config and config[name] != value}
    if wrong:
        raise ModelError(f"config.json describes a drafter this network can't run: {wrong}, expected {expected}")
    official = {
        **layer_config,
        "architectures": ["DFlashDraftModel"],
        "block_size": config.get("block_size"),
        # The library itself doesn't record it; the last feature layer bounds it from below.
        "num_target_layers": config.get("num_target_layers", max(ids, default=0)),
        "dflash_config": {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": [i - 1 for i in ids]},
    }
    return DrafterConfig.from_official(official)
