"""Rows of plain records, made in native code from the lines of a file; what isn't plain goes the general way.

Most records of a batch are alike: the usual fields, a conversation of texts, of a shape that the template has rendered
before. For them `_plain_rows.c` does in one pass what reading, normalising and planning do in some seventy calls of
Python. It is a short cut and nothing else: the programs that it replays are those of `turn_program`, found and proven
here; a line that it doesn't understand comes back as it is; and a row of each batch is made both ways and compared, one
in 1,024 rows or so with Jinja too.
Without a compiler at installation the module isn't there, and every record goes the general way, to the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dflash.config import TokenizeOptions
from dflash.data.chat import THINKING_FLAG, key_of
from dflash.data.completions import DEFAULT_LIMITS, open_completions, read_completions, read_line
from dflash.data.lines import Block, Line, ReadLimits, iter_blocks
from dflash.data.records import Completion, Reject, shown
from dflash.data.row_plan import ENCODED_CHARACTERS, RowPlan, plan_row
from dflash.data.rows import RowFlag
from dflash.data.scripts import SAMPLE_CHARACTERS, dominant_script
from dflash.data.turn_program import Shape, TurnProgram
from dflash.errors import RecordError, TokenizerError

if TYPE_CHECKING:
    from dflash.data._plain_rows import PlainRow, Planner
    from dflash.data.tokenizer import TargetTokenizer

try:
    from dflash.data import _plain_rows
except ImportError:  # no compiler when the package was installed
    _plain_rows = None  # type: ignore[assignment]

_THINKING: Final[dict[bytes, dict[str, Any]]] = {b"n": {}, b"t": {THINKING_FLAG: True}, b"f": {THINKING_FLAG: False}}
# Role and fields of a message as templates get it, and the letter that stands for it.
_KINDS: Final = {
    "system content": ord("s"),
    "developer content": ord("d"),
    "user content": ord("u"),
    "tool content": ord("t"),
    "assistant content": ord("a"),
    "assistant content reasoning_content thinking": ord("A"),
}
_TRACED_KIND: Final = ord("A")

log = logging.getLogger(__name__)


class PlainRows:
    """Reads files of completions for one tokenizer and its options, plain records straight to their rows."""

    def __init__(self, tokenizer: TargetTokenizer, options: TokenizeOptions) -> None:
        self._tokenizer = tokenizer
        self._num_programs = 0
        self._left_out: set[Shape] = set()
        self._planner: Planner | None = None
        if _plain_rows is None:
            log.info("dflash.data._plain_rows wasn't compiled: rows are planned in Python, at about half the speed")
        elif options.loss_on == "last_turn" and not tokenizer.lead:
            controls = tuple(text.encode() for text in tokenizer.controls.beginnings)
            self._planner = _plain_rows.Planner(
                controls,
                max_prompt_characters=options.max_seq_len * ENCODED_CHARACTERS,
                script_characters=SAMPLE_CHARACTERS,
            )

    def read(
        self, path: Path, *, file: str, limits: ReadLimits = DEFAULT_LIMITS
    ) -> Iterator[PlainRow | Completion | Reject]:
        """Read a file record by record, as `read_completions` does.

        Args:
            path: the local file.
            file: its name in ids and rejects, such as the object's key.
            limits: of a record and of a compressed file.

        Yields:
            What `read_completions` yields, but rows in the place of plain records.

        Raises:
            ObjectNotFoundError: there is no such file.
        """
        if self._planner is None:
            yield from read_completions(path, file=file, limits=limits)
            return
        with open_completions(path, file) as raw:
            for piece in iter_blocks(raw, file, limits):
                for found in (piece,) if isinstance(piece, Line) else self._plan(self._planner, piece, file):
                    entry = read_line(found, file) if isinstance(found, Line) else found
                    if entry is not None:
                        yield entry

    def _plan(self, planner: Planner, block: Block, file: str) -> Iterator[PlainRow | Line]:
        """A row for each plain line of a block, and the others as they are."""
        self._learn(planner)
        found = planner.plan(block.data, file, block.number, block.byte_offset)
        for number, item in enumerate(found, block.number):
            if len(item) != 2:
                yield item
            else:
                start, end = item
                yield Line(number, block.byte_offset + start, block.data[start:end], "newline")

    def _learn(self, planner: Planner) -> None:
        """Hand over the programs that were found since the last time, in their order."""
        found = self._tokenizer.turn_programs.found
        for shape, program in found[self._num_programs :]:
            kwargs, names = shape
            kinds, steps = _kinds(names), _steps(program)
            num_cuts = sum(step.expected is None for step in program.steps)
            if kinds is None or steps is None or _num_texts(kinds) + num_cuts > _plain_rows.MAX_REGISTERS:
                self._left_out.add(shape)
            if kinds is None or steps is None or shape in self._left_out:
                continue  # behind one that was left out too: the first program that fits has to be taken
            message = {"reasoning_content": ""} if kinds[-1] == _TRACED_KIND else {}
            for mark, given in _THINKING.items():
                if key_of(self._tokenizer.template.turn_kwargs(given, message)) == kwargs:
                    planner.add(mark + kinds, _num_texts(kinds), steps, program.prompt, program.sampled)
        self._num_programs = len(found)


def script_of(row: PlainRow) -> str:
    """The dominant script of a row's response."""
    return "latin" if row.response_head is None else dominant_script(row.response_head)


def plan_generally(row: PlainRow, tokenizer: TargetTokenizer, options: TokenizeOptions) -> RowPlan:
    """Make a row that carries its line once more, the general way.

    Raises:
        TokenizerError: something in it is different.
    """
    assert row.data is not None, "the caller looks"
    completion = read_line(Line(row.line, row.byte_offset, row.data, "newline"), row.file)
    if not isinstance(completion, Completion):
        raise _different(row, "record", completion, row)
    try:
        plan = plan_row(completion, tokenizer, options)
    except RecordError as error:
        raise _different(row, "row", error, row) from None
    segments = [(segment.text, segment.is_loss, segment.ids, segment.allow_special) for segment in plan.segments]
    pairs = {
        "texts": (segments, [(row.prompt, False, None, True), (row.response, True, None, True)]),
        "id": (completion.id, row.id),
        "source": (completion.source, row.source),
        "finish_reason": (completion.finish_reason, row.finish_reason),
        "output_tokens": (completion.output_tokens, row.output_tokens),
        "script": (dominant_script(plan.response_head), script_of(row)),
        "flags": (plan.flags, RowFlag.THINKING_ONLY if row.is_thinking_only else RowFlag(0)),
    }
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise _different(row, name, expected, found)
    return plan


def _different(row: PlainRow, what: str, expected: object, found: object) -> TokenizerError:
    return TokenizerError(
        f"{row.file}, line {row.line}: native code makes another row than Python, in its {what}: expected "
        f"{shown(expected)}, found {shown(found)}. Nothing of this batch is used. Remove dflash/data/_plain_rows*.so "
        "to go on, and report the line."
    )


def _kinds(names: Sequence[str]) -> bytes | None:
    """A letter a message for the shape of a conversation; None where native code doesn't know one."""
    messages = " ".join(names).split("role ")[1:]
    kinds = [_KINDS.get(message.strip()) for message in messages]
    return None if None in kinds else bytes(kind for kind in kinds if kind is not None)


def _num_texts(kinds: bytes) -> int:
    """Texts of a conversation; templates get a trace under two names."""
    return sum(3 if kind == _TRACED_KIND else 1 for kind in kinds)


def _steps(program: TurnProgram) -> tuple[tuple[str, int, str | None, bool | None], ...] | None:
    """Steps as native code takes them; None where one isn't known there, such as a look at a given place."""
    if not all(isinstance(piece, int) or _is_text(piece) for piece in (*program.prompt, *program.response)):
        return None
    steps = []
    for step in program.steps:
        argument, *others = step.arguments or (None,)
        if others or not (argument is None or _is_text(argument)):
            return None
        steps.append((step.name, step.source, argument, step.expected))
    return tuple(steps)


def _is_text(value: object) -> bool:
    """Whether it is a text that can be written as UTF-8."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
