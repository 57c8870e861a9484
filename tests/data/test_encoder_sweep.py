"""The fast encoder against Hugging Face on all that is at hand: whole vocabularies, every code point, fuzz, corpora.

The proof at the start of a run is a sample of this. A difference found here belongs into the probes
(`encoder_probes`), so that runs with such a tokenizer or library take the reference, and into docs/decisions.md.
"""

from __future__ import annotations

import gzip
import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastokens")

from dflash.data.encoders import FastokensEncoder, HuggingFaceEncoder, added_texts, find_difference
from dflash.data.tokenizer import TargetTokenizer

pytestmark = pytest.mark.slow

NUM_FUZZED = 200_000
BATCH = 20_000
LAST_CODE_POINT = 0x2FFFF
PIECES = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2028", "\u200b", "\u200d", "\ufe0f",
    "\ufeff", "\x00", "\x7f",
    "a", "B", "ab", "The", " the", "ing", "'s", "'LL", "\u2019t",
    "don't", "1", "12", "123", "1234567", "½", "٣", "\uff11",
    ".", "...", "!?", "://", "()", "{}", "</", "/>", "==", "--", "—", "“", "€",
    "中", "文字", "かな", "한글", "ไทย", "हिन्दी",
    "é", "e\u0301", "Å", "A\u030a", "ﬁ", "ǆ", "İ", "ß", "\u017f", "Ω", "\u1e9b\u0323", "\u0300",
    "👩‍💻", "🇩🇪", "\U0001d518", "\U0002f800",
    "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|im_", "end|>", "<tool_call>", "<|endoftext|>",
    "http", "\\n",
)  # fmt: skip


@pytest.fixture(scope="module", params=["qwen36", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> TargetTokenizer:
    found: TargetTokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def pair(tokenizer: TargetTokenizer) -> tuple[HuggingFaceEncoder, FastokensEncoder]:
    return HuggingFaceEncoder(tokenizer.backend), FastokensEncoder(tokenizer.backend)


def _assert_equal(pair: tuple[HuggingFaceEncoder, FastokensEncoder], texts: list[str]) -> None:
    for start in range(0, len(texts), BATCH):
        assert find_difference(*pair, texts[start : start + BATCH]) is None


def test_whole_vocabulary(tokenizer: TargetTokenizer, pair: tuple[HuggingFaceEncoder, FastokensEncoder]) -> None:
    """Each token alone, behind a letter and before one."""
    decode = tokenizer.backend.decode
    tokens = [decode([number], skip_special_tokens=False) for number in sorted(tokenizer.known_ids)]
    tokens += added_texts(tokenizer.backend)
    _assert_equal(pair, [text for token in tokens for text in (token, f"a{token}", f"{token} b")])


def test_every_code_point(pair: tuple[HuggingFaceEncoder, FastokensEncoder]) -> None:
    points = [chr(number) for number in range(LAST_CODE_POINT + 1) if not 0xD800 <= number <= 0xDFFF]
    _assert_equal(pair, [f"a{point} {point}{point}1" for point in points])


def test_fuzzed_strings(pair: tuple[HuggingFaceEncoder, FastokensEncoder]) -> None:
    rng = random.Random(20261130)
    assigned = [chr(n) for n in range(0x20, LAST_CODE_POINT) if unicodedata.category(chr(n)) not in ("Cs", "Cn", "Co")]

    def fuzzed() -> str:
        pool: Any = PIECES if rng.random() < 0.7 else (*PIECES, *rng.choices(assigned, k=20))
        return "".join(rng.choices(pool, k=rng.randint(1, 12)))

    _assert_equal(pair, [fuzzed() for _ in range(NUM_FUZZED)])


def _corpora(shared_data: Path, examples: Path) -> Iterator[str]:
    paths = [*sorted(examples.glob("part-*.jsonl*")), *sorted(shared_data.rglob("*.jsonl*"))]
    for path in paths:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line in data.splitlines():
            yield from _strings(json.loads(line))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def test_every_corpus_at_hand(
    pair: tuple[HuggingFaceEncoder, FastokensEncoder], shared_data: Path, example_completions: Path
) -> None:
    texts = list(dict.fromkeys(_corpora(shared_data, example_completions)))
    assert len(texts) > 10_000
    _assert_equal(pair, texts)
