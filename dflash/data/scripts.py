"""The dominant script of a text, coarse and fast: for the mix of a batch, not for linguistics."""

from __future__ import annotations

import re
import string

import numpy as np

# First code point of each range and the script it belongs to; "" is no letter, or too rare to tell apart.
_RANGES: tuple[tuple[int, str], ...] = (
    (0x0000, ""), (0x0041, "latin"), (0x005B, ""), (0x0061, "latin"), (0x007B, ""), (0x00C0, "latin"),
    (0x0250, ""), (0x0370, "greek"), (0x0400, "cyrillic"), (0x0530, "armenian"), (0x0590, "hebrew"),
    (0x0600, "arabic"), (0x0700, ""), (0x0750, "arabic"), (0x0780, ""), (0x0900, "indic"), (0x0E00, "thai"),
    (0x0E80, "other"), (0x10A0, "georgian"), (0x1100, "hangul"), (0x1200, "other"), (0x1E00, "latin"),
    (0x1F00, "greek"), (0x2000, ""), (0x3040, "kana"), (0x3100, ""), (0x3130, "hangul"), (0x3190, ""),
    (0x3400, "han"), (0x4DC0, ""), (0x4E00, "han"), (0xA000, "other"), (0xAC00, "hangul"), (0xD7B0, ""),
    (0xF900, "han"), (0xFB00, ""), (0xFB50, "arabic"), (0xFE00, ""), (0xFE70, "arabic"), (0xFEFF, ""),
    (0xFF66, "kana"), (0xFFA0, ""), (0x20000, "han"), (0x32000, ""),
)  # fmt: skip
_NAMES = sorted({name for _, name in _RANGES})
_NUM_POINTS = 0x110000
# The number in _NAMES of each code point's script: looking them up is ten times faster than searching the ranges.
_SCRIPT_OF = np.repeat(
    np.array([_NAMES.index(name) for _, name in _RANGES], np.uint8),
    np.diff([start for start, _ in _RANGES], append=_NUM_POINTS),
)

_ASCII_LETTER = re.compile("[A-Za-z]")
_NO_ASCII_LETTERS = bytes(set(range(256)) - set(string.ascii_letters.encode()))

NO_SCRIPT = "none"
SAMPLE_CHARACTERS = 4096
_FEW = 512


def dominant_script(text: str) -> str:
    """The script of most letters among the first 4,096 characters; `none` where there is no letter.

    Han beside any kana counts as `kana`: Japanese text is mostly Han.
    """
    head = text[:SAMPLE_CHARACTERS]
    if head.isascii():
        return "latin" if _ASCII_LETTER.search(head) else NO_SCRIPT
    written = head.encode("utf-8", "surrogatepass")
    # No other script has more letters than characters that aren't ASCII, which take one to three bytes more.
    if _num_ascii_letters(written[:_FEW]) > len(written) - len(head):  # mostly few letters decide
        return "latin"
    plain = head.encode("ascii", "ignore")
    if _num_ascii_letters(plain) > len(head) - len(plain):
        return "latin"
    points = np.frombuffer(head.encode("utf-32-le", "surrogatepass"), "<u4")
    counts = np.bincount(_SCRIPT_OF[points], minlength=len(_NAMES))
    counts[_NAMES.index("")] = 0
    han, kana = _NAMES.index("han"), _NAMES.index("kana")
    if counts[kana] * 10 >= counts[han] and counts[kana]:
        counts[kana] += counts[han]
    return _NAMES[int(counts.argmax())] if counts.any() else NO_SCRIPT


def _num_ascii_letters(text: bytes) -> int:
    return len(text.translate(None, _NO_ASCII_LETTERS))
