"""Assistant turns as straight-line programs: prompt and response of a conversation from one replay.

Two traces of a template, of the history with the generation prompt and of the whole conversation, say of which pieces
both consist. Where the first's are the beginning of the second's, the rest is the response, and what has to be looked
for in a rendered response is known of all records of the shape: that it prints the message's texts, and which control
token ends it. Anything else is left to `turns`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from dflash.data.control_tokens import ControlTokens
from dflash.data.template_trace import CHECK_EVERY, Trace
from dflash.data.traced_text import Piece, Step, join_pieces, run_steps

MAX_PROGRAMS: Final = 512
Shape = tuple[Hashable, tuple[str, ...]]  # the template's arguments, and the roles and fields of the messages
TEXT_FIELDS: Final = ("reasoning_content", "content")


class TurnTexts(msgspec.Struct, frozen=True):
    """What a turn reads.

    Attributes:
        prompt: what the server prefilled, generation prompt included.
        response: what the template prints after it.
        terminator: start and end of the control token that ends the response, the only one in it.
    """

    prompt: str
    response: str
    terminator: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TurnProgram:
    """How the turns of one shape come to be.

    Attributes:
        steps: in order; a register is a text of the conversation or the result of a step.
        prompt: pieces of the prompt.
        response: pieces of the response.
        tail: characters of the response from the start of the end-of-turn token, and from its end.
    """

    steps: tuple[Step, ...]
    prompt: tuple[Piece, ...]
    response: tuple[Piece, ...]
    tail: tuple[int, int]

    @classmethod
    def of(cls, prompt: Trace, full: Trace, message: Mapping[str, str], controls: ControlTokens) -> Self | None:
        """Make the program of a turn from the traces of its history and of the whole; None where it isn't that plain.

        Args:
            prompt: of the history with the generation prompt.
            full: of the history and the message.
            message: the last one; its names count.
            controls: of the vocabulary.
        """
        if not set(message).issubset(("role", "thinking", *TEXT_FIELDS)):
            return None
        steps, numbers = _joined(prompt, full)
        begin = tuple(piece if isinstance(piece, str) else numbers[piece] for piece in prompt.pieces)
        rest = _behind(begin, full.pieces)
        if rest is None or not _prints(rest, steps, full.num_texts, message):
            return None
        tail = _tail(rest, controls)
        return None if tail is None else cls(steps, begin, rest, tail)

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """Pieces of the response up to the end of its end-of-turn token."""
        *before, last = self.response
        assert isinstance(last, str), "the token is in a literal"
        return (*before, last[: len(last) - self.tail[1]])

    def replay(self, texts: Sequence[str]) -> TurnTexts | None:
        """The turn with these texts, which spell no control token; None if the template would go another way."""
        registers = run_steps(self.steps, texts)
        if registers is None:
            return None
        response = join_pieces(self.response, registers)
        terminator = (len(response) - self.tail[0], len(response) - self.tail[1])
        return TurnTexts(join_pieces(self.prompt, registers), response, terminator)


class TurnPrograms:
    """Programs by shape, made as shapes come.

    Attributes:
        found: all of them with their shapes, in the order in which they were found.
        num_replays: how many turns they made here, native code aside.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Shape, TurnProgram]] = []
        self._programs: dict[Shape, list[TurnProgram]] = {}
        self._num_attempts = 0
        self.num_replays = 0
        self._num_unchecked = 0

    def replay(self, shape: Shape, texts: Sequence[str]) -> TurnTexts | None:
        """The turn as the first program that fits makes it; None where there is none."""
        for program in self._programs.get(shape, ()):
            found = program.replay(texts)
            if found is not None:
                self.num_replays += 1
                self.note_replays(1)
                return found
        return None

    def has(self, shape: Shape) -> bool:
        """Whether there is a program for turns of this shape."""
        return shape in self._programs

    def note_replays(self, count: int) -> None:
        """Count turns that a program made, here or in native code."""
        self._num_unchecked += count

    def takes_check(self) -> bool:
        """Whether the last replay is one to compare; the next such is `CHECK_EVERY` further."""
        is_due = self._num_unchecked >= CHECK_EVERY
        if is_due:
            self._num_unchecked = 0
        return is_due

    @property
    def has_room(self) -> bool:
        """Whether one more program may be tried; each attempt counts, since one that fails is as dear."""
        return self._num_attempts < MAX_PROGRAMS

    def note_attempt(self) -> None:
        """Count an attempt to make a program."""
        self._num_attempts += 1

    def add(self, shape: Shape, program: TurnProgram) -> None:
        """Keep a program that has been proven."""
        self._programs.setdefault(shape, []).append(program)
        self.found.append((shape, program))


def _joined(prompt: Trace, full: Trace) -> tuple[tuple[Step, ...], dict[int, int]]:
    """Steps of both, each once, and the numbers that the first's registers get."""
    steps = list(full.steps)
    numbers = {number: number for number in range(prompt.num_texts)}
    results = {(step.function, step.source, step.arguments): number for number, step in _cuts(full)}
    next_result, num_registers = prompt.num_texts, full.num_texts + len(results)
    for step in prompt.steps:
        moved = step._replace(source=numbers[step.source])
        key = (moved.function, moved.source, moved.arguments)
        if moved.expected is not None:
            if moved not in steps:
                steps.append(moved)
            continue
        if key not in results:
            steps.append(moved)
            results[key] = num_registers
            num_registers += 1
        numbers[next_result] = results[key]
        next_result += 1
    return tuple(steps), numbers


def _cuts(trace: Trace) -> list[tuple[int, Step]]:
    cuts = [step for step in trace.steps if step.expected is None]
    return list(enumerate(cuts, trace.num_texts))


def _behind(begin: Sequence[Piece], full: Sequence[Piece]) -> tuple[Piece, ...] | None:
    """Pieces of `full` behind those of `begin`; None where they don't continue them."""
    for number, piece in enumerate(begin):
        if number >= len(full):
            return None
        other = full[number]
        if piece == other:
            continue
        if number == len(begin) - 1 and isinstance(piece, str) and isinstance(other, str) and other.startswith(piece):
            return (other[len(piece) :], *full[number + 1 :])
        return None
    return tuple(full[len(begin) :])


def _prints(pieces: Sequence[Piece], steps: Sequence[Step], num_texts: int, message: Mapping[str, str]) -> bool:
    """Whether the pieces hold the message's texts, cut of nothing but white space, and no other's."""
    origins: dict[int, int] = {number: number for number in range(num_texts)}
    number = num_texts
    for step in steps:
        if step.expected is None:
            chars = step.arguments[0]
            if step.source in origins and (chars is None or chars.isspace()):
                origins[number] = origins[step.source]
            number += 1
    names = [name for name in message if name != "role"]
    fields = dict(zip(range(num_texts - len(names), num_texts), names, strict=True))
    printed = [fields.get(origins.get(piece, -1)) for piece in pieces if isinstance(piece, int)]
    aliases = ["reasoning_content" if field == "thinking" else field for field in printed]
    return None not in printed and set(aliases) == set(TEXT_FIELDS).intersection(names)


def _tail(pieces: Sequence[Piece], controls: ControlTokens) -> tuple[int, int] | None:
    """Where the one control token stands, counted from the end; None where texts could make others with literals."""
    *before, last = pieces or ("",)
    if not isinstance(last, str):
        return None
    spans = controls.spans(last)
    if len(spans) != 1 or last[spans[0][1] :].strip():
        return None
    for piece, following in itertools.pairwise(pieces):
        if isinstance(piece, int) and isinstance(following, int):
            return None
    for number, piece in enumerate(pieces):
        if isinstance(piece, str):
            has_text_before, has_text_after = number > 0, number < len(pieces) - 1
            if (has_text_before and controls.ended_by(piece)) or (has_text_after and controls.begun_by(piece)):
                return None
    if any(isinstance(piece, str) and controls.spans(piece) for piece in before):
        return None
    start, end = spans[0]
    return len(last) - start, len(last) - end
