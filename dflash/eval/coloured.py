"""One decoded answer with the drafter's share visible: accepted drafts, and tokens that the target wrote itself."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from rich.text import Text

from dflash.data.quality_report import printable
from dflash.data.tokenizer import TargetTokenizer
from dflash.eval.speculate import Decoded

DRAFTED, OWN = "bold green", "dim"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one origin.

    Attributes:
        text: what they spell.
        is_draft: accepted drafts; else the target's own tokens.
        num_tokens: how many.
    """

    text: str
    is_draft: bool
    num_tokens: int


def segments(decoded: Decoded, tokenizer: TargetTokenizer) -> list[Segment]:
    """Split a decoded sequence by origin; a character spread over both belongs to the run that completes it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    runs = _runs(decoded)
    found = []
    for place, (is_draft, ids) in enumerate(runs):
        data = tokenizer.token_bytes.decode(ids)
        found.append(Segment(decoder.decode(data, final=place == len(runs) - 1), is_draft, len(ids)))
    return found


def render(decoded: Decoded, tokenizer: TargetTokenizer) -> Text:
    """The answer for a terminal: accepted drafts green, the target's own tokens dim, a count below."""
    text, parts = Text(), segments(decoded, tokenizer)
    for part in parts:
        shown = "".join(char if char in "\n\t" else printable(char) for char in part.text)
        text.append(shown, DRAFTED if part.is_draft else OWN)
    drafted = sum(part.num_tokens for part in parts if part.is_draft)
    text.append(f"\n\n{drafted} of {len(decoded.ids)} tokens ", "bold").append("drafted", DRAFTED)
    return text.append(f", {len(decoded.accepted)} passes of the target behind the prompt's\n", "bold")


def _runs(decoded: Decoded) -> list[tuple[bool, list[int]]]:
    """Ids by origin: the prompt's pass gives one token, each round its accepted drafts and one more of the target."""
    origins = [False]
    for accepted in decoded.accepted:
        origins += [True] * accepted + [False]
    runs: list[tuple[bool, list[int]]] = []
    for is_draft, token in zip(origins, decoded.ids, strict=False):
        if not runs or runs[-1][0] != is_draft:
            runs.append((is_draft, []))
        runs[-1][1].append(token)
    return runs
