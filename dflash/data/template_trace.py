"""Chat templates as straight-line programs: what one rendering did to its texts, replayed on other records.

Jinja takes about half a millisecond a conversation, most of it in its sandbox. So a template is rendered once over
texts that note what is done to them: cut white space, tests and concatenations. That is a `Trace`. A record of the
same shape (roles, fields, arguments) for which every noted test comes out alike renders to the same pieces, with its
own texts in their places. A record with another outcome gets a trace of its own; what can't be followed is left to
Jinja.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2

from dflash.data.traced_text import (
    MARK,
    Piece,
    Recorder,
    Step,
    TracedText,
    Untraceable,
    concat,
    join_pieces,
    run_steps,
)
from dflash.errors import RecordError, TokenizerError

MAX_MESSAGES: Final = 64  # of a conversation that is traced
MAX_SHAPES: Final = 4096  # what comes beyond is left to Jinja
MAX_TRACES: Final = 512
CHECK_EVERY: Final = 1024  # replays of which one is rendered by Jinja too

# Texts that templates, and filters that bypass the notes, treat in ways of their own.
PROBES: Final = (
    "",
    " \n padded\t\n",
    "<b>&amp;\"quoted\" 'text'</b>",
    "a</think>b",
    "<think>\na\n</think>\n\nb",
    "<tool_response>a</tool_response>",
    "<|im_start|>user\nb<|im_end|>",
    "{{ messages }}{% if x %}",
    "\\n %s {0} \u2028 \u0085 Straße 漢字",
    "true",
)

Message = Mapping[str, Any]
Variables = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """One way through a template.

    Attributes:
        num_texts: of a record; their registers come first.
        steps: in order; a register is a text of the record or the result of a step.
        pieces: the result, literals and registers.
    """

    num_texts: int
    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]

    def replay(self, texts: Sequence[str]) -> str | None:
        """Render the record with these texts; None if the template would go another way."""
        registers = run_steps(self.steps, texts)
        return None if registers is None else join_pieces(self.pieces, registers)


class TracedTemplate:
    """A compiled template that is traced once for each shape and way, and replayed from then on.

    A shape is traced when it comes for the second time. Threads may share one template: what two of them note at once
    is noted twice.
    """

    def __init__(self, compiled: jinja2.Template, source: str, reference: Callable[[Variables], str]) -> None:
        """Prepare for tracing.

        Args:
            compiled: the template, for its environment.
            source: its text.
            reference: renders variables by Jinja.
        """
        environment = compiled.environment.overlay()
        environment.concat = concat  # type: ignore[method-assign]
        self._traced = environment.from_string(source)
        self._reference = reference
        self._traces: dict[Hashable, list[Trace]] = {}
        self.num_traces = 0
        self.num_replays = 0

    def render(self, messages: Sequence[Message], variables: Variables, kind: Hashable) -> str:
        """Render as the reference does.

        Args:
            messages: of the conversation.
            variables: all names that the template gets but `messages`.
            kind: equal for equal variables; None where they can't be compared.

        Raises:
            TokenizerError: a replay differs from the reference.
        """
        shape = None if kind is None else shape_of(messages)
        if shape is None:
            return self._by_reference(messages, variables)
        names, texts = shape
        key = (kind, names)
        traces = self._traces.get(key)
        if traces is None:
            if len(self._traces) < MAX_SHAPES:
                self._traces[key] = []
            return self._by_reference(messages, variables)
        for trace in traces:
            text = trace.replay(texts)
            if text is not None:
                self.num_replays += 1
                if self.num_replays % CHECK_EVERY == 0:
                    require_same(text, self._by_reference(messages, variables), messages)
                return text
        expected = self._by_reference(messages, variables)
        if self.num_traces < MAX_TRACES:
            self.num_traces += 1  # attempts count: one that fails is as dear
            found = self._trace(messages, variables, len(texts))
            if found and found.replay(texts) == expected and self._holds(found, messages, variables):
                traces.append(found)
        return expected

    def trace(self, messages: Sequence[Message], kind: Hashable) -> Trace | None:
        """The trace that renders these messages, where there is one."""
        shape = None if kind is None else shape_of(messages)
        if shape is None:
            return None
        names, texts = shape
        found = self._traces.get((kind, names), ())
        return next((trace for trace in found if trace.replay(texts) is not None), None)

    def _by_reference(self, messages: Sequence[Message], variables: Variables) -> str:
        return self._reference({**variables, "messages": messages})

    def _trace(self, messages: Sequence[Message], variables: Variables, num_texts: int) -> Trace | None:
        recorder = Recorder(num_texts)
        numbers = iter(range(num_texts))
        traced = _replaced(messages, lambda text: TracedText.of(recorder, text, (next(numbers),)))
        try:
            result = self._traced.render({**variables, "messages": traced})
        except (Untraceable, Exception):  # noqa: BLE001 (the reference can render it, so it is the tracing that fails)
            return None
        pieces = result.pieces if isinstance(result, TracedText) else (result,)
        if any(isinstance(piece, str) and MARK in piece for piece in pieces):
            return None
        return Trace(num_texts, tuple(recorder.steps.values()), pieces)

    def _holds(self, trace: Trace, messages: Sequence[Message], variables: Variables) -> bool:
        """Whether the trace equals the reference wherever it claims a record with probes in place of its texts."""
        for variant in probed(messages):
            found = trace.replay(_texts(variant))
            try:
                if found is not None and found != self._by_reference(variant, variables):
                    return False
            except RecordError:
                return False
        return True


def shape_of(messages: Sequence[Message]) -> tuple[tuple[str, ...], list[str]] | None:
    """Roles and fields of a conversation, and its texts; None if it is long or holds anything else than texts."""
    if len(messages) > MAX_MESSAGES:
        return None
    names: list[str] = []
    texts: list[str] = []
    for message in messages:
        for name, value in message.items():
            if value.__class__ is not str:
                return None
            names.append(name)
            if name == "role":
                names.append(value)
            else:
                texts.append(value)
    return tuple(names), texts


def _texts(messages: Sequence[Message]) -> list[str]:
    return [value for message in messages for name, value in message.items() if name != "role"]


def _replaced(messages: Iterable[Message], change: Callable[[str], str]) -> list[dict[str, str]]:
    return [
        {name: value if name == "role" else change(value) for name, value in message.items()} for message in messages
    ]


def probed(messages: Sequence[Message]) -> Iterator[list[dict[str, str]]]:
    """Variants of a conversation: each probe as the last message's texts, and all probes in turn as all texts."""
    for start, probe in enumerate(PROBES):
        yield [*map(dict, messages[:-1]), *_replaced(messages[-1:], lambda _, probe=probe: probe)]  # type: ignore[misc]
        rest = iter((PROBES[start:] + PROBES[:start]) * (len(_texts(messages)) // len(PROBES) + 1))
        yield _replaced(messages, lambda _, rest=rest: next(rest))  # type: ignore[misc]


def require_same(found: str, expected: str, messages: Sequence[Message]) -> None:
    """Refuse a replay that differs from the reference.

    Raises:
        TokenizerError: it does.
    """
    if found == expected:
        return
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(found), len(expected)))
    raise TokenizerError(
        f"The replayed chat template gives another text than Jinja for a conversation of {len(messages)} messages, "
        f"at character {at}: expected {expected[at : at + 60]!r}, found {found[at : at + 60]!r}. Nothing of this "
        f"batch is used. Report the template and the record."
    )
