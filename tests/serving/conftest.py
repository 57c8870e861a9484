"""A tiny random target with the real SmolLM2 tokenizer, as a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory, smollm2_tokenizer_dir: Path) -> Path:
    """A checkpoint that loads in a second."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    shutil.copytree(smollm2_tokenizer_dir, folder)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
