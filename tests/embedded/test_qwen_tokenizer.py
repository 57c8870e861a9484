from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash.errors import TokenizerError
from embedded.qwen_tokenizer import derive_merges, ensure_qwen36_tokenizer


@pytest.fixture(scope="module")
def tokenizer(qwen36_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(qwen36_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded(qwen36_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(qwen36_dir)


@pytest.mark.parametrize(
    ("token", "token_id"),
    [
        ("<|endoftext|>", 248_044),
        ("<|im_end|>", 248_046),
        ("<tool_call>", 248_058),
        ("<think>", 248_068),
        ("</think>", 248_069),
        ("<|audio_pad|>", 248_076),
    ],
)
def test_added_tokens_have_the_published_ids(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    assert tokenizer.token_to_id(token) == token_id
    assert tokenizer.encode(token).ids == [token_id]


@pytest.mark.parametrize(
    "text", ["Hello, world!", "x = 1024\n\n\n  y", "हिन्दी और ไทย", "naïve 🙂", "<think>\n</think>\n\nok<|im_end|>"]
)
def test_both_libraries_agree_and_decode(loaded: PreTrainedTokenizerFast, tokenizer: Tokenizer, text: str) -> None:
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text).ids
    assert loaded.decode(ids) == text


def test_marks_stay_with_their_letters(tokenizer: Tokenizer) -> None:
    """The older split regex knows no combining marks and cuts this word in more pieces."""
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("हिन्दी")
    assert len(pieces) == 1


def test_only_marker_tokens_are_skipped_in_decoding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a</think><|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_names_end_of_turn_padding_and_template(loaded: PreTrainedTokenizerFast) -> None:
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (248_046, 248_044, None)
    rendered = loaded.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_a_second_call_is_free(qwen36_dir: Path) -> None:
    """The template isn't even read: nothing is built when all is there."""
    assert ensure_qwen36_tokenizer(qwen36_dir, Path("absent.jinja")) == qwen36_dir


def test_another_template_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    with pytest.raises(TokenizerError, match="expected SHA-256 e84f32a2"):
        ensure_qwen36_tokenizer(tmp_path / "out", template)
    assert not (tmp_path / "out").exists()


def test_a_missing_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"absent\.jinja can't be read"):
        ensure_qwen36_tokenizer(tmp_path / "out", tmp_path / "absent.jinja")


def test_merges_follow_the_ranks() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5, b"cba": 6}
    # `abc` comes from a + bc, since bc was learnt first; cba can't be reached in two pieces.
    assert derive_merges(ranks) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]
