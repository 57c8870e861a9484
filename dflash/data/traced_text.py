"""Texts that note what a template does to them; `template_trace` makes programs of the notes.

Three safeguards keep a note from being missed. Every method of `str` that isn't noted refuses. Code that reads a text
without its methods (C functions, regular expressions) sees a mark, which gives itself away in the result. And a trace
counts only if it equals the reference on probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn, Self

MARK: Final = "\ue003"  # what a text is to code that doesn't call its methods

Piece = str | int  # a literal, or the number of a register


class Untraceable(BaseException):
    """The template does something to a text that isn't noted.

    No `Exception`, since Jinja handles some of those.
    """


class Step(NamedTuple):
    """Apply a function to a register.

    Attributes:
        function: of `str`.
        source: number of the register.
        arguments: plain ones.
        expected: what a test has to give; None where the result is a new register.
    """

    function: Callable[..., Any]
    source: int
    arguments: tuple[Any, ...]
    expected: bool | None

    @property
    def name(self) -> str:
        """Name of the function."""
        return next(name for name, function in _FUNCTIONS.items() if function is self.function)


def run_steps(steps: Iterable[Step], texts: Iterable[str]) -> list[Any] | None:
    """The registers of a record with these texts; None where a test comes out otherwise than noted."""
    registers: list[Any] = list(texts)
    for function, source, arguments, expected in steps:
        value = function(registers[source], *arguments)
        if expected is None:
            registers.append(value)
        elif value is not expected:
            return None
    return registers


def join_pieces(pieces: Iterable[Piece], registers: Sequence[str]) -> str:
    """The text that pieces are of these registers."""
    return "".join([registers[piece] if isinstance(piece, int) else piece for piece in pieces])


@dataclass(slots=True)
class Recorder:
    """Steps noted so far, each once.

    Attributes:
        num_registers: texts of the record, and results so far.
        steps: by function, source and arguments.
    """

    num_registers: int
    steps: dict[tuple[Any, ...], Step] = field(default_factory=dict)
    _results: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def note_test(self, name: str, source: int, arguments: tuple[Any, ...], outcome: bool) -> None:
        """Note a test of a register and how it came out."""
        self.steps.setdefault((name, source, arguments), Step(_FUNCTIONS[name], source, arguments, outcome))

    def note_cut(self, name: str, source: int, arguments: tuple[Any, ...]) -> int:
        """Note that a register is cut; returns the register of the result."""
        key = (name, source, arguments)
        if key not in self.steps:
            self.steps[key] = Step(_FUNCTIONS[name], source, arguments, None)
            self._results[key] = self.num_registers
            self.num_registers += 1
        return self._results[key]


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
    "startswith": str.startswith,
    "endswith": str.endswith,
    "contains": str.__contains__,
    "equals": str.__eq__,
    "is_true": bool,
}


class TracedText(str):
    """A text of the record that is traced. As a plain string it is a mark, never what it stands for."""

    __slots__ = ("pieces", "real", "recorder")

    recorder: Recorder
    real: str
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, recorder: Recorder, real: str, pieces: tuple[Piece, ...]) -> Self:
        """A text that reads `real` in the traced record and consists of these pieces."""
        text = cls(MARK)
        text.recorder, text.real, text.pieces = recorder, real, pieces
        return text

    def _register(self) -> int:
        if len(self.pieces) != 1 or not isinstance(self.pieces[0], int):
            raise Untraceable
        return self.pieces[0]

    def _test(self, name: str, *arguments: Any) -> bool:
        _require_plain(arguments)
        outcome = bool(_FUNCTIONS[name](self.real, *arguments))
        self.recorder.note_test(name, self._register(), arguments, outcome)
        return outcome

    def _cut(self, name: str, chars: str | None) -> Self:
        _require_plain((chars,))
        register = self.recorder.note_cut(name, self._register(), (chars,))
        return self.of(self.recorder, _FUNCTIONS[name](self.real, chars), (register,))

    def strip(self, chars: str | None = None, /) -> Self:
        """See `str`; noted."""
        return self._cut("strip", chars)

    def lstrip(self, chars: str | None = None, /) -> Self:
        """See `str`; noted."""
        return self._cut("lstrip", chars)

    def rstrip(self, chars: str | None = None, /) -> Self:
        """See `str`; noted."""
        return self._cut("rstrip", chars)

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        """See `str`; noted."""
        return self._test("startswith", prefix, *bounds)

    def endswith(self, suffix: Any, *bounds: Any) -> bool:
        """See `str`; noted."""
        return self._test("endswith", suffix, *bounds)

    def __contains__(self, part: Any) -> bool:
        return self._test("contains", part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._test("equals", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self._test("is_true")

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return concat((self, other))

    def __radd__(self, other: str) -> str:
        return concat((other, self))

    def __hash__(self) -> int:
        raise Untraceable


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Untraceable


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__format__", "__repr__")
_OF_OBJECT = frozenset(dir(object)).difference(_COMPARISONS)
for _name in frozenset(dir(str)).difference(_OF_OBJECT, vars(TracedText)):
    setattr(TracedText, _name, _refuse)


def _require_plain(arguments: Iterable[Any]) -> None:
    if any(argument.__class__ not in (str, int, type(None)) for argument in arguments):
        raise Untraceable


def concat(parts: Iterable[str]) -> str:
    """Concatenate, keeping the notes: takes the place of Jinja's own function."""
    texts = list(parts)
    traced = next((text for text in texts if isinstance(text, TracedText)), None)
    if traced is None:
        return "".join(texts)
    pieces: list[Piece] = []
    for text in texts:
        for piece in text.pieces if isinstance(text, TracedText) else (str(text),):
            if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
                pieces[-1] += piece
            else:
                pieces.append(piece)
    real = "".join([text.real if isinstance(text, TracedText) else text for text in texts])
    return TracedText.of(traced.recorder, real, tuple(pieces))
