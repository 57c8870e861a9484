from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash.model.drafter import Drafter
from dflash.model.features import Target
from dflash.model.layout import DrafterConfig
from tests.eval.small_run import SmallRun, write_prompts, write_target

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Wide enough that logits differ clearly: ties would let rounding choose.
    "initializer_range": 0.4,
}
LAYERS = (0, 2)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))


def sliding() -> Any:
    config = transformers.Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=0, layer_types=["sliding_attention"] * 4
    )
    return transformers.Qwen3ForCausalLM(config)


def hybrid() -> Any:
    config = transformers.Qwen3_5TextConfig(
        **SIZES | {"num_hidden_layers": 3},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )
    return transformers.Qwen3_5ForCausalLM(config)


MODELS = {"llama": llama, "sliding": sliding, "hybrid": hybrid}


@pytest.fixture(scope="session")
def targets() -> Callable[[str], Target]:
    built: dict[str, Target] = {}

    def get(name: str) -> Target:
        if name not in built:
            torch.manual_seed(11)
            built[name] = Target(MODELS[name]().float(), LAYERS)
        return built[name]

    return get


@pytest.fixture(scope="session")
def random_drafter() -> Callable[[Target], Drafter]:
    def build(target: Target, block_size: int = 6) -> Drafter:
        config = DrafterConfig.for_target(
            target.text_config,
            mask_token_id=1,
            num_hidden_layers=1,
            block_size=block_size,
            target_layer_ids=LAYERS,
        )
        drafter = Drafter(config)
        drafter.initialize(torch.Generator().manual_seed(2), std=0.2)
        return drafter

    return build


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def small_run(tmp_path: Path, target_folder: Path) -> SmallRun:
    """A run without checkpoints yet."""
    return SmallRun(tmp_path / "run", target_folder, write_prompts(tmp_path / "prompts.jsonl"))
