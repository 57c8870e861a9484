"""Tokenizers for the tests of the data plane: two real ones, and a Llama-3-like one on a real vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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
def sentencepiece_like() -> TargetTokenizer:
    """A small tokenizer that puts a space in front of each text, as Llama 2's does, with headers of its own."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    specials = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(["the answer is four", "the question is what? a b c", "\n"] * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    return adapt_tokenizer(tokenizer)


@pytest.fixture(scope="session")
def gapped() -> TargetTokenizer:
    """A byte-level vocabulary of the ids 0, 1 and 5."""
    backend = Tokenizer(models.WordLevel({"q": 0, "yes": 1}, unk_token="q"))
    backend = Tokenizer.from_str(backend.to_str().replace('"yes":1', '"yes":1,"!":5'))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="!")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    return adapt_tokenizer(tokenizer)


@pytest.fixture(scope="session")
def chatml(smollm2_tokenizer_dir: Path) -> TargetTokenizer:
    """SmolLM2's vocabulary with a ChatML template that reads the trace."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2_tokenizer_dir)
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    return adapt_tokenizer(tokenizer)
