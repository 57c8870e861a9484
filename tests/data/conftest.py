"""Tokenizers for the tests of the data plane: two real ones, and a Llama-3-like one on a real vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.tokenizer import TargetTokenizer, adapt_tokenizer, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture(scope="session")
def qwen36(qwen36_dir: Path) -> TargetTokenizer:
    """The real Qwen3.6 tokenizer."""
    return load_tokenizer(qwen36_dir)


@pytest.fixture(scope="session")
def smollm2(smollm2_tokenizer_dir: Path) -> TargetTokenizer:
    """The real SmolLM2 tokenizer: ChatML with a default system prompt."""
    return load_tokenizer(smollm2_tokenizer_dir)


@pytest.fixture(scope="session")
def llama3_like_tokenizer(smollm2_tokenizer_dir: Path) -> PreTrainedTokenizerFast:
    """SmolLM2's vocabulary with the control tokens and a template in the manner of Llama 3."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2_tokenizer_dir)
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_tokens(names, special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = names[0], names[3]
    tokenizer.chat_template = (TEMPLATES / "llama3_like.jinja").read_text()
    return tokenizer


@pytest.fixture(scope="session")
def llama3_like(llama3_like_tokenizer: PreTrainedTokenizerFast) -> TargetTokenizer:
    return adapt_tokenizer(llama3_like_tokenizer)


@pytest.fixture(scope="session")
def chatml(smollm2_tokenizer_dir: Path) -> TargetTokenizer:
    """SmolLM2's vocabulary with a ChatML template that reads the trace."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2_tokenizer_dir)
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    return adapt_tokenizer(tokenizer)
