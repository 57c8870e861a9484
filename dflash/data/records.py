"""What reading completions yields: a `Completion`, or a `Reject` with one of a closed set of reasons.

What is made for each record is a `msgspec.Struct`, here and wherever records pass: making a frozen dataclass takes
twenty times as long.
"""

from __future__ import annotations

import reprlib
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from dflash.errors import RecordError

if TYPE_CHECKING:
    from dflash.data._plain_rows import PlainRow

FinishReason = Literal["stop", "length", "tool_calls"]


class Reason(StrEnum):
    """Why a record, or the rest of a file, was rejected; the codes that reports count.

    Reading raises the codes up to `ABORTED_RESPONSE`; the others come from rendering and tokenizing.
    """

    # The file: one reject a file, for all that lies behind the given position.
    TRUNCATED_FILE = "truncated_file"
    """A compressed file ends in the middle of a gzip member or a Zstandard frame; records before the cut are kept."""
    CORRUPT_STREAM = "corrupt_stream"
    """The compressed data can't be decoded or fails its checksum: records already read of this file are unverified."""
    FILE_TOO_LARGE = "file_too_large"
    """A compressed file grows beyond the limit for its size; what lies before the limit is kept."""

    # The line.
    TORN_LINE = "torn_line"
    """The last line has no newline and isn't a whole JSON value: its writer was stopped."""
    RECORD_TOO_LARGE = "record_too_large"
    """The line is longer than the limit; it was skipped without being held in memory."""
    INVALID_UTF8 = "invalid_utf8"
    """The line holds bytes that aren't UTF-8."""
    INVALID_JSON = "invalid_json"
    """The line isn't one JSON value."""
    INVALID_NUMBER = "invalid_number"
    """NaN, Infinity, a number that overflows to infinity, or an integer of more than 4,300 digits."""
    INVALID_UNICODE = "invalid_unicode"
    r"""A string holds half of a surrogate pair (such as `\ud83d` alone): no tokenizer can encode it."""
    DUPLICATE_KEY = "duplicate_key"
    """An object, at any depth, names a key twice: which value counts would be a guess."""
    TOO_DEEP = "too_deep"
    """Values are nested deeper than 200 levels."""
    NOT_AN_OBJECT = "not_an_object"
    """The line is JSON, yet no object."""

    # The record.
    BAD_FIELD = "bad_field"
    """A known field is missing or has another type than documented."""
    UNKNOWN_ROLE = "unknown_role"
    """A message's role is none of the known ones; it is never guessed."""
    NON_TEXT_PART = "non_text_part"
    """A message holds an image, audio or another part that isn't text."""
    CONFLICTING_REASONING = "conflicting_reasoning"
    """A message carries two different thinking traces, in two fields or in a field and inline."""
    TOOL_ARGUMENTS_NOT_JSON = "tool_arguments_not_json"
    """The arguments of a tool call are a string that isn't JSON."""
    TOOL_ARGUMENTS_NOT_OBJECT = "tool_arguments_not_object"
    """The arguments of a tool call are JSON, yet no object."""
    NO_ASSISTANT_RESPONSE = "no_assistant_response"
    """The last message isn't from the assistant: there is nothing that the target sampled."""
    EMPTY_RESPONSE = "empty_response"
    """The last message has no text, no trace, no tool call, and the record no sampled ids."""
    ABORTED_RESPONSE = "aborted_response"
    """The server broke the response off, by an error, a cancelled request or a filter: it isn't the target's own."""

    # Rendering and tokenizing.
    TEMPLATE_ERROR = "template_error"
    """The chat template refuses the conversation."""
    NO_LOSS_TOKENS_WITHIN_MAX_SEQ_LEN = "no_loss_tokens_within_max_seq_len"
    """The prompt alone fills the window."""
    TOO_FEW_LOSS_TOKENS = "too_few_loss_tokens"
    """Fewer adjacent loss tokens than training needs."""
    SAMPLED_IDS_MISMATCH = "sampled_ids_mismatch"
    """The sampled ids spell another text than the message: another tokenizer's, or another record's."""


class Completion(msgspec.Struct, frozen=True):
    """One normalised record: a conversation whose last message is what the target sampled.

    Attributes:
        id: the record's own id, if it has one.
        messages: each has `role` (system, developer, user, assistant or tool) and `content`: text, None, or (never for
            the assistant) a list of `{"type": "text", "text": ...}`. The assistant's trace is in `reasoning_content`
            alone; the key is missing when the record has no trace, and empty when it says that the trace is empty.
            `tool_calls[i]` is `{"id"?, "type", "function": {"name", "arguments"}}` with the arguments as a dict.
        tools: tool schemas, exactly as in the record.
        finish_reason: after `stop` and `tool_calls` the end-of-turn token was sampled, after `length` it wasn't; None
            where the record doesn't say.
        output_tokens: tokens that the target sampled, as the server counted them.
        chat_template_kwargs: what the request gave the template, such as `enable_thinking`.
        prompt_token_ids: ids that the server prefilled.
        output_token_ids: ids that the target sampled.
        source: where the prompt came from; a label for reports.
        model: the target's name; a label for reports.
        file: name of the file, as in rejects.
        line: number of the line, from 1; blank lines count.
        byte_offset: of the line's first byte in the decompressed file.
    """

    id: str | None
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    finish_reason: FinishReason | None
    output_tokens: int | None
    chat_template_kwargs: dict[str, Any]
    prompt_token_ids: list[int] | None
    output_token_ids: list[int] | None
    source: str | None
    model: str | None
    file: str
    line: int
    byte_offset: int

    @property
    def sample_id(self) -> str:
        """The record's id, else `file:line`."""
        return sample_id_of(self)


class Reject(msgspec.Struct, frozen=True):
    """A record, or the rest of a file, that can't be used.

    Attributes:
        file: name of the file.
        line: number of the line, from 1; for a file that breaks off, the line in which it does.
        byte_offset: of the line's first byte in the decompressed file; for a file that breaks off, of its end.
        reason: a code of `Reason`.
        message: what was expected, what was found, what to do.
        id: the record's id, as far as it could be read.
    """

    file: str
    line: int
    byte_offset: int
    reason: str
    message: str
    id: str | None = None

    @classmethod
    def of(cls, record: Completion | PlainRow, error: RecordError) -> Self:
        """The reject of a record that was read, by what was raised for it."""
        return cls(record.file, record.line, record.byte_offset, error.reason, error.message, record.id)


def sample_id_of(record: Completion | PlainRow) -> str:
    """The record's id, else `file:line`."""
    return f"{record.file}:{record.line}" if record.id is None else record.id


def bad_field(where: str, expected: str, found: object) -> RecordError:
    """An error for a field of the wrong type or value."""
    return RecordError(
        Reason.BAD_FIELD,
        f"{where}: expected {expected}, found {type(found).__name__} {shown(found)}. Correct it where it is made.",
    )


def shown(value: object) -> str:
    """A value for a message, cut to a line however large it is."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
