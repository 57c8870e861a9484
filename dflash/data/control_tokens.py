"""Control tokens of a vocabulary: which texts they have and where a render holds them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash.errors import RecordError

# Stands for a control token's characters while the template's own ones are looked for. A private-use character is no
# white space and no letter, so templates treat it as they treat the text it stands for.
MASK_CHARACTER = "\ue000"


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The added tokens marked special, and the end-of-sequence token.

    Attributes:
        ids: text and id of each. Only these are ever left unrecognised in a response; other added tokens
            (`</think>`, `<tool_call>` in Qwen's vocabulary) are ordinary tokens that the target samples.
    """

    ids: Mapping[str, int]
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _signs: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        longest_first = sorted((text for text in self.ids if text), key=len, reverse=True)
        # The engine searches for a first character far faster than for alternatives that share it.
        firsts = sorted({text[0] for text in longest_first})
        shared = firsts[0] if len(firsts) == 1 else ""
        rests = "|".join(re.escape(text[len(shared) :]) for text in longest_first)
        pattern = re.compile(f"{re.escape(shared)}(?:{rests})" if longest_first else "(?!)")
        object.__setattr__(self, "_pattern", pattern)
        object.__setattr__(self, "_signs", _signs(longest_first))

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Texts with one of which each control token begins."""
        return tuple(self._signs)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each control token that `text` spells."""
        if not self._may_spell(text):
            return []
        return [match.span() for match in self._pattern.finditer(text)]

    def spelled_in_text(self, text: str) -> bool:
        """Whether `text` spells a control token."""
        return self._may_spell(text) and self._pattern.search(text) is not None

    def spelled_in(self, value: Any) -> bool:
        """Whether any string inside `value`, keys included, spells a control token."""
        pending = [value]
        for item in pending:  # grows while it is walked
            if isinstance(item, str):
                if self.spelled_in_text(item):
                    return True
            elif isinstance(item, Mapping):
                pending += item.keys()
                pending += item.values()
            elif isinstance(item, list):
                pending += item
        return False

    def begun_by(self, text: str) -> bool:
        """Whether text behind `text` could complete a control token that starts in it."""
        return any(text.endswith(token[:size]) for token in self.ids for size in range(1, len(token)))

    def ended_by(self, text: str) -> bool:
        """Whether text before `text` could start a control token that ends in it."""
        return any(text.startswith(token[-size:]) for token in self.ids for size in range(1, len(token)))

    def _may_spell(self, text: str) -> bool:
        # Finding a character is many times faster than two characters in a row, or than the pattern.
        for beginning, signs in self._signs.items():
            for sign in signs:
                if sign not in text:
                    break
            else:
                if beginning in text:
                    return True
        return False

    def masked(self, value: Any) -> Any:
        """`value` with each control token that its strings spell replaced by as many mask characters.

        Raises:
            RecordError: `template_error`; `value` is nested too deeply.
        """
        try:
            return self._masked(value)
        except RecursionError as error:
            raise RecordError("template_error", "the completion's fields are nested too deeply to render") from error

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: MASK_CHARACTER * len(match[0]), value)
        if isinstance(value, Mapping):
            return {self._masked(key): self._masked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._masked(item) for item in value]
        return value


def _signs(texts: Iterable[str]) -> dict[str, str]:
    """For texts with the same first two characters: what they all begin with, and the signs that are in all of them.

    Signs are no letters or digits: those are in most texts, and tell little.
    """
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(text[:2], []).append(text)
    signs: dict[str, str] = {}
    for kind in alike.values():
        beginning = os.path.commonprefix(kind)  # noqa: RUF071 (of texts, not of paths)
        signs[beginning] = "".join(sorted(c for c in set.intersection(*map(set, kind)) if not c.isalnum()))
    return signs
