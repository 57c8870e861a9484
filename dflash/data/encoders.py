"""From texts to ids in bulk: the reference, and a faster encoder that is used only where it is proven equal.

`RAYON_NUM_THREADS` (both encoders), `TOKENIZERS_PARALLELISM` (the reference) and `FASTOKENS_BPE_THREADS` (the fast
one) are read when a process first encodes. They belong to whoever starts the process: a pool with a process a core
sets the two thread counts to 1, or each process takes all cores.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from dflash.data.encoder_probes import TEXT_PROBES, added_token_probes
from dflash.errors import TokenizerError

Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]

PROOF_SAMPLE_CHARACTERS = 50_000  # of the batch, in each process; the reference takes about 0.15 s for them twice
CHECKED_CHARACTERS = 1_000  # of each batch of texts; the reference takes about 2 ms for them

# Whether control tokens are recognised is a setting of a backend, which any number of encoders share. One lock for all
# backends costs nothing: the reference uses all cores for a batch, and a process encodes with one tokenizer.
_setting_lock = threading.Lock()


class Encoder(Protocol):
    """Encodes texts in bulk."""

    @property
    def name(self) -> str:
        """What the manifest records."""
        ...

    def encode_batch_flat(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        """Encode without adding tokens.

        Args:
            texts: n valid Unicode strings.
            allow_special: whether text that spells a control token (an added token marked special) becomes that
                token; other added tokens always do.

        Returns:
            int32 [t], the ids of all texts joined, and int64 [n + 1]: text i has ids[offsets[i]:offsets[i + 1]].
        """
        ...


class FastEncoder(Encoder, Protocol):
    """An encoder that has to be proven equal to the reference."""

    def encode_unchecked(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        """As `encode_batch_flat`, without asking the reference."""
        ...


class HuggingFaceEncoder:
    """The reference: Hugging Face `tokenizers`.

    Any threads may use encoders of the same backend; a thread that calls the backend itself meanwhile may get ids
    without control tokens.
    """

    name = "huggingface"

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def encode_batch_flat(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        """See `Encoder`.

        Raises:
            TokenizerError: the package failed on a text.
        """
        with _setting_lock, rust_panics_as_errors("tokenizers"):
            before = self._backend.encode_special_tokens
            self._backend.encode_special_tokens = not allow_special
            try:
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            finally:
                self._backend.encode_special_tokens = before
        parts = [np.array(encoding.ids, np.int32) for encoding in encodings]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return (np.concatenate(parts) if parts else np.zeros(0, np.int32)), offsets


class FastokensEncoder:
    """The `fastokens` package: about a hundred times the reference's speed.

    A piece of one text of each batch is encoded by the reference too (about 0.03 % of all characters), so that a
    difference which the proof at the start missed stops the run instead of entering a dataset.
    """

    name = "fastokens"

    def __init__(self, backend: Tokenizer, definition: str | None = None) -> None:
        """Build from the reference's own definition, which may be given: `backend.to_str()` or its equal.

        Raises:
            ImportError: the package isn't installed.
            ValueError: it doesn't support this tokenizer.
            TokenizerError: it failed on this tokenizer.
        """
        self._reference = HuggingFaceEncoder(backend)
        with rust_panics_as_errors("fastokens"):
            tokenizer = importlib.import_module("fastokens").Tokenizer
            self._fast: Any = tokenizer.from_json_str(backend.to_str() if definition is None else definition)

    def encode_batch_flat(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        """See `Encoder`.

        Raises:
            TokenizerError: the reference gives other ids, or the package failed on a text.
        """
        ids, offsets = self.encode_unchecked(texts, allow_special=allow_special)
        if len(texts):
            number = len(ids)  # as good as random, and the same in every run
            index = number % len(texts)
            self._check(texts[index], ids[offsets[index] : offsets[index + 1]], number, allow_special=allow_special)
        return ids, offsets

    def _check(self, text: str, found: Ids, number: int, *, allow_special: bool) -> None:
        """Compare a text's ids with those it gets alone, and a piece of it, chosen by a number, with the reference."""
        start = number % max(1, len(text) - CHECKED_CHARACTERS + 1)
        piece = text[start : start + CHECKED_CHARACTERS]
        expected, _ = self._reference.encode_batch_flat([piece], allow_special=allow_special)
        if len(piece) < len(text):
            alone, bounds = self.encode_unchecked([text, piece], allow_special=allow_special)
            equal = np.array_equal(alone[: bounds[1]], found) and np.array_equal(alone[bounds[1] :], expected)
        else:
            equal = np.array_equal(found, expected)
        if not equal:
            raise TokenizerError(
                f"The fast encoder gives other ids than Hugging Face tokenizers, or others beside other texts, for a "
                f"text of {len(text)} characters that starts with {text[:60]!r}. Nothing of this batch is used. "
                f"Uninstall fastokens, or run again with the reference encoder, and report the text."
            )

    def encode_unchecked(self, texts: Sequence[str], *, allow_special: bool) -> tuple[Ids, Offsets]:
        """As `encode_batch_flat`, without asking the reference."""
        with rust_panics_as_errors("fastokens"):
            ids, offsets = self._fast.encode_batch_flat(list(texts), False, not allow_special)
        return np.frombuffer(ids, "<i4").astype(np.int32, copy=False), np.frombuffer(offsets, "<u8").astype(np.int64)


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """The encoder to use and why."""

    encoder: Encoder
    reason: str

    @property
    def name(self) -> str:
        """Name of the encoder."""
        return self.encoder.name


def choose_encoder(backend: Tokenizer, definition: str | None = None) -> EncoderChoice:
    """The fast encoder if it gives the reference's ids on the probes, else the reference.

    Args:
        backend: the tokenizer.
        definition: what `backend.to_str()` gives, or its equal, where it is at hand.
    """
    reference = HuggingFaceEncoder(backend)
    try:
        fast = FastokensEncoder(backend, definition)
    except ImportError:
        return EncoderChoice(reference, "fastokens is not installed")
    except Exception as error:  # noqa: BLE001 (what it raises for a tokenizer it can't build is not documented)
        return EncoderChoice(reference, f"fastokens doesn't support this tokenizer: {type(error).__name__}: {error}")
    texts = [*TEXT_PROBES, *added_token_probes(added_texts(backend))]
    return _proven(fast, reference, texts, f"fastokens gives the same ids on {len(texts)} texts")


def confirm_encoder(choice: EncoderChoice, backend: Tokenizer, sample: Sequence[str]) -> EncoderChoice:
    """The choice if it holds on texts of the batch that is to be encoded, else the reference.

    Args:
        choice: from `choose_encoder`.
        backend: the tokenizer.
        sample: texts of the batch; the first `PROOF_SAMPLE_CHARACTERS` are used.
    """
    if isinstance(choice.encoder, HuggingFaceEncoder):
        return choice
    fast = cast("FastEncoder", choice.encoder)
    head = _head(sample)
    reason = f"{choice.reason} and on {len(head)} of the batch"
    return _proven(fast, HuggingFaceEncoder(backend), head, reason)


def _proven(fast: FastEncoder, reference: Encoder, texts: Sequence[str], reason: str) -> EncoderChoice:
    try:
        difference = find_difference(reference, fast, texts)
    except Exception as error:  # noqa: BLE001 (not documented; a text that the reference fails on stops the run later)
        return EncoderChoice(reference, f"fastokens can't encode: {type(error).__name__}: {error}")
    if difference is not None:
        return EncoderChoice(reference, f"fastokens gives other ids: {difference}")
    return EncoderChoice(fast, reason)


def find_difference(reference: Encoder, fast: FastEncoder, texts: Sequence[str]) -> str | None:
    """Describe the first of `texts` for which the two encoders differ; None where there is none."""
    for allow_special in (True, False):
        expected, expected_offsets = reference.encode_batch_flat(texts, allow_special=allow_special)
        found, found_offsets = fast.encode_unchecked(texts, allow_special=allow_special)
        if np.array_equal(expected, found) and np.array_equal(expected_offsets, found_offsets):
            continue
        for index, text in enumerate(texts):
            wanted = expected[expected_offsets[index] : expected_offsets[index + 1]].tolist()
            got = found[found_offsets[index] : found_offsets[index + 1]].tolist()
            if wanted != got:
                return (
                    f"for {text[:60]!r} (control tokens {'on' if allow_special else 'off'}) "
                    f"expected {wanted[:12]}, found {got[:12]}"
                )
    return None


@contextmanager
def rust_panics_as_errors(package: str) -> Iterator[None]:
    """Turn a panic of a package written in Rust into an error.

    Panics arrive as `pyo3_runtime.PanicException`, which no module exports and which is no `Exception`: it passes all
    handlers, and it can't be sent back from a worker process.

    Raises:
        TokenizerError: the package panicked.
    """
    try:
        yield
    except BaseException as error:
        if f"{type(error).__module__}.{type(error).__qualname__}" != "pyo3_runtime.PanicException":
            raise
        raise TokenizerError(
            f"The package {package} failed in its own code: {error}. Expected ids or an error, found a panic. Check "
            f"tokenizer.json and the input, or install another version of {package}."
        ) from None


def added_texts(backend: Tokenizer) -> list[str]:
    """Texts of the added tokens, by id."""
    return [token.content for _, token in sorted(backend.get_added_tokens_decoder().items())]


def _head(sample: Sequence[str]) -> list[str]:
    head: list[str] = []
    left = PROOF_SAMPLE_CHARACTERS
    for text in sample:
        if left <= 0:
            break
        head.append(text[:left])
        left -= len(text)
    return head
