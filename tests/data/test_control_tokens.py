"""Control tokens are found in every text that spells one, and in no other, however the search is cut short."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.control_tokens import ControlTokens

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_bos_single>")
BERT = ("[CLS]", "[SEP]", "[PAD]", "</s>", "<s>")
WORDS = ("a", "ab", "stop", "Ω|", "b c")


@pytest.mark.parametrize("tokens", [QWEN, BERT, WORDS, (), ("", "x")], ids=["qwen", "bert", "words", "none", "empty"])
def test_search_finds_what_looking_for_each_token_finds(tokens: tuple[str, ...]) -> None:
    controls = ControlTokens({token: number for number, token in enumerate(tokens)})
    pieces = [token[start:end] for token in tokens for start in range(len(token)) for end in range(start + 1, 99)]
    # Parts of tokens, whole ones, their single characters, and other text, so that near misses are as common as hits.
    parts = st.one_of(
        st.sampled_from([*pieces, "x"]),
        st.sampled_from([*tokens, "x"]),
        st.sampled_from("<>|_[]/x é漢"),
        st.text(max_size=3),
    )
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    found = 0

    @settings(max_examples=400, deadline=None)
    @given(st.lists(parts, max_size=6).map("".join))
    def check(text: str) -> None:
        nonlocal found
        expected = any(token in text for token in tokens if token)
        found += expected
        assert controls.spelled_in_text(text) is expected
        spans = [match.span() for match in re.finditer("|".join(map(re.escape, longest_first)) or "(?!)", text)]
        assert controls.spans(text) == spans

    check()
    assert found > 40 or not longest_first, "many texts spell a token, or nothing was tested"
