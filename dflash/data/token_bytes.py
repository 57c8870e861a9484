"""Bytes of tokens: to check ids that a server sampled against its text, and to bound lengths without encoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer, decoders


class TokenBytes:
    """Bytes of each id of a vocabulary. The table is built at first use (0.2 s for 248,000 tokens)."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    @cached_property
    def longest(self) -> int | None:
        """Most bytes of text that one token can stand for; None where there is no such bound.

        Text of more than n times as many bytes has more than n tokens.
        """
        added = self._backend.get_added_tokens_decoder().values()
        if not self._is_byte_level or any(token.lstrip or token.rstrip for token in added):
            return None
        return max(
            max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=1),
            max((len(token.content.encode()) for token in added), default=1),
        )

    def decode(self, ids: Sequence[int]) -> bytes:
        """Bytes that `ids` stand for, not always valid UTF-8; an id without a token stands for nothing."""
        if not self._is_byte_level:
            return self._backend.decode(ids, skip_special_tokens=False).encode()
        return b"".join([self._table.get(number, b"") for number in ids])

    def normalised_size(self, text: str) -> int:
        """Bytes of `text` as the model of the tokenizer sees it."""
        normalizer = self._backend.normalizer
        return len((normalizer.normalize_str(text) if normalizer else text).encode())

    @cached_property
    def _table(self) -> dict[int, bytes]:
        of_character = _bytes_of_characters()
        table = {}
        for token, number in self._backend.get_vocab(with_added_tokens=False).items():
            try:
                table[number] = bytes(map(of_character.__getitem__, token))
            except KeyError:  # an entry outside the byte alphabet stands for its own text
                table[number] = token.encode()
        for number, added in self._backend.get_added_tokens_decoder().items():
            table[number] = added.content.encode()
        return table


def _bytes_of_characters() -> dict[str, int]:
    """The byte alphabet of GPT-2: printable bytes stand for themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return table
