"""The fast encoder is used where it is proven equal, and nowhere else."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from dflash.data.encoder_probes import TEXT_PROBES, added_token_probes
from dflash.data.encoders import (
    CHECKED_CHARACTERS,
    EncoderChoice,
    FastokensEncoder,
    HuggingFaceEncoder,
    Ids,
    Offsets,
    added_texts,
    choose_encoder,
    confirm_encoder,
    find_difference,
    rust_panics_as_errors,
)
from dflash.data.tokenizer import TargetTokenizer
from dflash.errors import TokenizerError

CONTROL = "<|im_end|>"
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.sampled_from([*TEXT_PROBES, CONTROL, "<|im_start|>", "</think>", "<tool_call>", " ", "\n\n", "\u0301"]),
    ),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def fast(smollm2: TargetTokenizer) -> FastokensEncoder:
    pytest.importorskip("fastokens")
    return FastokensEncoder(smollm2.backend)


def test_reference_gives_the_ids_of_one_encode_call_each(smollm2: TargetTokenizer) -> None:
    texts = [*TEXT_PROBES, *added_token_probes(added_texts(smollm2.backend))]
    ids, offsets = HuggingFaceEncoder(smollm2.backend).encode_batch_flat(texts, allow_special=True)
    assert (ids.dtype, offsets.dtype, offsets[0], offsets[-1]) == (np.int32, np.int64, 0, len(ids))
    for index, text in enumerate(texts):
        expected = smollm2.backend.encode(text, add_special_tokens=False).ids
        assert ids[offsets[index] : offsets[index + 1]].tolist() == expected


def test_reference_restores_the_setting_it_borrows(smollm2: TargetTokenizer) -> None:
    ids, _ = HuggingFaceEncoder(smollm2.backend).encode_batch_flat([CONTROL], allow_special=False)
    assert smollm2.controls.ids[CONTROL] not in ids
    assert smollm2.backend.encode_special_tokens is False


def test_no_texts(smollm2: TargetTokenizer) -> None:
    ids, offsets = HuggingFaceEncoder(smollm2.backend).encode_batch_flat([], allow_special=True)
    assert (len(ids), offsets.tolist()) == (0, [0])


@pytest.mark.parametrize("allow_special", [True, False])
def test_fast_encoder_is_equal(smollm2: TargetTokenizer, fast: FastokensEncoder, *, allow_special: bool) -> None:
    @FEW
    @given(text=TEXTS)
    def check(text: str) -> None:
        expected, _ = HuggingFaceEncoder(smollm2.backend).encode_batch_flat([text], allow_special=allow_special)
        found, _ = fast.encode_unchecked([text], allow_special=allow_special)
        assert found.tolist() == expected.tolist()

    check()


def test_whole_vocabulary_is_equal(smollm2: TargetTokenizer, fast: FastokensEncoder) -> None:
    backend = smollm2.backend
    texts = [backend.decode([number], skip_special_tokens=False) for number in range(smollm2.vocab_size)]
    assert find_difference(HuggingFaceEncoder(backend), fast, texts) is None


@pytest.mark.parametrize("name", ["smollm2", "qwen36"])
def test_fast_encoder_is_chosen_for_real_tokenizers(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("fastokens")
    choice = request.getfixturevalue(name).encoder_for(["a sample of the batch"])
    assert choice.name == "fastokens"
    assert "same ids" in choice.reason


def test_reference_is_chosen_where_the_package_is_missing(
    smollm2: TargetTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    choice = choose_encoder(smollm2.backend)
    assert (choice.name, choice.reason) == ("huggingface", "fastokens is not installed")


def _panic(*_: object) -> NoReturn:
    """Fail as a Rust extension does; no input is known on which one of these packages panics."""
    raise type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})("index out of bounds")


@pytest.mark.parametrize("method", ["from_json_str", "encode_batch_flat"])
def test_reference_is_chosen_where_the_package_panics(
    smollm2: TargetTokenizer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    package = SimpleNamespace(from_json_str=lambda _: SimpleNamespace(encode_batch_flat=_panic))
    setattr(package, method, _panic)
    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=package))
    choice = choose_encoder(smollm2.backend)
    assert choice.name == "huggingface"
    assert "failed in its own code: index out of bounds" in choice.reason


def test_panic_while_running_is_an_error(fast: FastokensEncoder) -> None:
    encoder = copy.copy(fast)
    encoder._fast = SimpleNamespace(encode_batch_flat=_panic)
    with pytest.raises(TokenizerError, match="fastokens failed in its own code"):
        encoder.encode_batch_flat(["a"], allow_special=True)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_interruptions_pass(interruption: type[BaseException]) -> None:
    with pytest.raises(interruption), rust_panics_as_errors("fastokens"):
        raise interruption


def test_threads_with_encoders_of_their_own_share_the_setting_of_a_backend(smollm2: TargetTokenizer) -> None:
    """While one thread encodes with control tokens, another would switch them off."""

    class Slow:
        """The backend; it encodes when another thread has had its chance to change the setting."""

        encode_special_tokens = False

        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
            time.sleep(0.2)
            smollm2.backend.encode_special_tokens = self.encode_special_tokens
            return smollm2.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    backend: Any = Slow()

    def encode(*, allow_special: bool) -> int:
        ids, _ = HuggingFaceEncoder(backend).encode_batch_flat([CONTROL], allow_special=allow_special)
        return len(ids)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(encode, allow_special=True)
        second = threads.submit(encode, allow_special=False)
        assert first.result() == 1
        assert second.result() > 1
    smollm2.backend.encode_special_tokens = False


def test_reference_is_chosen_for_a_tokenizer_that_the_package_does_not_support() -> None:
    pytest.importorskip("fastokens")
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    choice = choose_encoder(backend)
    assert choice.name == "huggingface"
    assert choice.reason.startswith("fastokens ")


class _Wrong(FastokensEncoder):
    """Errs on one text: stands for a defect that no fixed probe finds."""

    text = "the text that it gets wrong"

    def encode_unchecked(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        read_only, offsets = super().encode_unchecked(texts, allow_special=allow_special)
        ids = read_only.copy()
        if self.text in texts:
            ids[offsets[texts.index(self.text)]] += 1
        return ids, offsets


@pytest.fixture
def wrong(fast: FastokensEncoder) -> _Wrong:
    encoder = copy.copy(fast)
    encoder.__class__ = _Wrong
    return encoder  # type: ignore[return-value]


def test_difference_in_the_sample_leads_to_the_reference(
    smollm2: TargetTokenizer, wrong: _Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.data.encoders.FastokensEncoder", lambda *_: wrong)
    chosen = choose_encoder(smollm2.backend)
    assert confirm_encoder(chosen, smollm2.backend, ["fine"]).name == "fastokens"
    choice = confirm_encoder(chosen, smollm2.backend, ["fine", _Wrong.text])
    assert choice.name == "huggingface"
    assert _Wrong.text in choice.reason


def test_difference_while_running_stops(wrong: _Wrong) -> None:
    wrong.encode_batch_flat(["fine"], allow_special=True)
    with pytest.raises(TokenizerError, match="other ids than Hugging Face"):
        wrong.encode_batch_flat([_Wrong.text], allow_special=True)


class _WrongBesideOthers(FastokensEncoder):
    """Gives a long text other ids in a batch than alone."""

    def encode_unchecked(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        read_only, offsets = super().encode_unchecked(texts, allow_special=allow_special)
        ids = read_only.copy()
        ids[0] += len(texts) == 1
        return ids, offsets


class _WrongInLongTexts(FastokensEncoder):
    """Counts wrong in a text that is longer than what the reference is asked about."""

    def encode_unchecked(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        read_only, offsets = super().encode_unchecked(texts, allow_special=allow_special)
        ids = read_only.copy()
        if len(texts) > 1:
            ids[-1] += 1
        return ids, offsets


@pytest.mark.parametrize("kind", [_WrongBesideOthers, _WrongInLongTexts])
def test_difference_in_a_long_text_stops_too(fast: FastokensEncoder, kind: type[FastokensEncoder]) -> None:
    encoder = copy.copy(fast)
    encoder.__class__ = kind
    text = "a long answer, sentence by sentence. " * 200
    assert len(text) > CHECKED_CHARACTERS
    fast.encode_batch_flat([text], allow_special=True)
    with pytest.raises(TokenizerError, match="or others beside other texts"):
        encoder.encode_batch_flat([text], allow_special=True)


def test_choice_is_made_once(smollm2: TargetTokenizer) -> None:
    first: EncoderChoice = smollm2.encoder_for(["a"])
    assert smollm2.encoder_for(["b"]) is first
