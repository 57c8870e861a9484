r"""Completions from JSON Lines files: each line becomes a `Completion` or a `Reject`, nothing disappears.

Reading streams: memory is bounded by the longest record. Pitfalls that the tests hold: records end at `\n` alone,
keys of tools and arguments are kept as written, a damaged line costs no other line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from dflash.data.lines import Line, ReadLimits, iter_lines
from dflash.data.messages import normalise_message
from dflash.data.records import Completion, FinishReason, Reason, Reject, bad_field, shown
from dflash.data.strict_json import check_finite, check_value, parse_json
from dflash.errors import ObjectNotFoundError, RecordError

__all__ = ["Completion", "ReadLimits", "Reason", "Reject", "normalise_record", "read_completions"]

# What OpenAI's API, SGLang, vLLM, Text Generation Inference and Anthropic's API say, in lower case.
FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    **dict.fromkeys(("stop", "stop_sequence", "eos", "eos_token", "end_turn"), "stop"),
    **dict.fromkeys(("tool_calls", "function_call", "tool_use"), "tool_calls"),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"), "length"),
    **dict.fromkeys(("pause_turn", "repetition"), "length"),  # the server stopped sampling inside the turn
}
ABORTED: Final = frozenset({"abort", "aborted", "error", "cancelled", "content_filter", "refusal"})
DEFAULT_LIMITS = ReadLimits()
_MAX_TOKEN_ID = 2**31 - 1  # ids are stored as int32
_BOM = b"\xef\xbb\xbf"


def read_completions(path: Path, *, file: str, limits: ReadLimits = DEFAULT_LIMITS) -> Iterator[Completion | Reject]:
    """Read a .jsonl, .jsonl.gz or .jsonl.zst file record by record.

    Args:
        path: the local file.
        file: its name in ids and rejects, such as the object's key.
        limits: of a record and of a compressed file.

    Yields:
        A completion or a reject for each line that isn't blank; one reject more, the last, where a compressed file
        breaks off. An empty file yields nothing.

    Raises:
        ObjectNotFoundError: there is no such file.
    """
    with open_completions(path, file) as raw:
        for line in iter_lines(raw, file, limits):
            entry = read_line(line, file)
            if entry is not None:
                yield entry


def open_completions(path: Path, file: str) -> BinaryIO:
    """Open a file of completions.

    Raises:
        ObjectNotFoundError: there is no such file.
    """
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ObjectNotFoundError(f"{path} (for {file}): expected a file of completions, found none.") from None


def normalise_record(
    record: Mapping[str, Any], *, file: str = "", line: int = 0, byte_offset: int = 0, is_parsed: bool = False
) -> Completion:
    """Normalise a record that was not read by `read_completions`; the record itself is left as it is.

    Args:
        record: as in the documented input format, with its aliases.
        file: name for ids and messages.
        line: number of the line.
        byte_offset: of the line.
        is_parsed: all its values came through `parse_json`, which has checked them.

    Raises:
        RecordError: with a code of `Reason`.
    """
    plain = dict(record)
    if not is_parsed:
        check_value(plain)
    return _complete(plain, file, line, byte_offset)


def read_line(line: Line, file: str) -> Completion | Reject | None:
    """What a line holds; None for a blank one, and for the torn end of a file that breaks off (a fault follows)."""
    if line.error is not None:
        return Reject(file, line.number, line.byte_offset, line.error.reason, line.error.message)
    data = line.data
    if not data.startswith(b"{"):
        data = data.removeprefix(_BOM).strip(b" \t\r")
        if not data:
            return None
    record: Any = None
    try:
        record = parse_json(data)
        if not isinstance(record, dict):
            raise _not_an_object(record)
        return _complete(record, file, line.number, line.byte_offset)
    except RecordError as error:
        if record is None and line.ending != "newline" and error.reason in (Reason.INVALID_JSON, Reason.INVALID_UTF8):
            if line.ending == "cut":
                return None
            error = _torn(error)
        return Reject(file, line.number, line.byte_offset, error.reason, error.message, _readable_id(record))


def _complete(record: dict[str, Any], file: str, line: int, byte_offset: int) -> Completion:
    kwargs = optional_object(record, "chat_template_kwargs")
    messages = _messages(record, thinking_off=kwargs.get("enable_thinking") is False)
    finish_reason = _finish_reason(record)
    output_token_ids = _token_ids(record, "output_token_ids")
    if not output_token_ids:
        _check_not_empty(messages[-1])
    return Completion(
        id=_id(record),
        messages=messages,
        tools=_tools(record),
        finish_reason=finish_reason,
        output_tokens=_count(record, "output_tokens"),
        chat_template_kwargs=kwargs,
        prompt_token_ids=_token_ids(record, "prompt_token_ids"),
        output_token_ids=output_token_ids,
        source=_text(record, "source"),
        model=_text(record, "model"),
        file=file,
        line=line,
        byte_offset=byte_offset,
    )


def _messages(record: dict[str, Any], *, thinking_off: bool) -> list[dict[str, Any]]:
    messages = record.get("messages")
    if messages is None:
        messages = record.get("conversations")
    elif record.get("conversations") is not None:
        raise bad_field("the record", "either messages or conversations", list(record))
    if not isinstance(messages, list):
        raise bad_field("messages", "a list of messages", messages)
    final = len(messages) - 1
    result = [
        normalise_message(message, index, thinking_off=thinking_off and index == final)
        for index, message in enumerate(messages)
    ]
    if not result or result[-1]["role"] != "assistant":
        found = f"role {result[-1]['role']}" if result else "no message"
        raise RecordError(
            Reason.NO_ASSISTANT_RESPONSE,
            f"expected the assistant's message last, found {found}: nothing was sampled. Leave the record out.",
        )
    return result


def _finish_reason(record: dict[str, Any]) -> FinishReason | None:
    """One of three meanings; a spelling that isn't known is never guessed, as it decides the end-of-turn token."""
    given = _text(record, "finish_reason")
    if given is None:
        return None
    spelling = given.casefold()
    if spelling in ABORTED:
        raise RecordError(
            Reason.ABORTED_RESPONSE,
            f"expected a response that the target ended or a limit cut, found finish_reason {shown(given)}: the server "
            "broke it off. Sample it again, or leave the record out.",
        )
    if spelling not in FINISH_REASONS:
        raise bad_field("finish_reason", f"one of {', '.join(sorted({*FINISH_REASONS, *ABORTED}))}", given)
    return FINISH_REASONS[spelling]


def _check_not_empty(response: dict[str, Any]) -> None:
    texts = (response["content"], response.get("reasoning_content"))
    if not any(text and not text.isspace() for text in texts) and "tool_calls" not in response:
        raise RecordError(
            Reason.EMPTY_RESPONSE,
            "expected text, a trace, tool calls or sampled ids in the last message, found none. Was the text stored in "
            "a field that isn't read? Known are content, reasoning_content, reasoning, thinking and tool_calls.",
        )


def _id(record: dict[str, Any]) -> str | None:
    value = record.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(record, "id")


def _readable_id(record: Any) -> str | None:
    value = record.get("id") if isinstance(record, dict) else None
    is_id = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value) or None if is_id else None


def _text(record: dict[str, Any], name: str) -> str | None:
    """A text field; an empty text counts as none."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_field(name, "text", value)
    return value or None


def _count(record: dict[str, Any], name: str) -> int | None:
    value = record.get(name)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise bad_field(name, "an integer of at least 0", value)


def optional_object(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that holds an object, empty where the record has none.

    Raises:
        RecordError: it is something else, or holds NaN or infinity.
    """
    value = record.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_field(name, "an object", value)
    check_finite(value, name)
    return value


def _tools(record: dict[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_field("tools", "a list of objects", tools)
    check_finite(tools, "tools")
    return tools or None


def _token_ids(record: dict[str, Any], name: str) -> list[int] | None:
    """Ids that fit an int32; an empty list counts as none."""
    ids = record.get(name)
    if not ids and (ids is None or ids == []):
        return None
    # A comprehension that keeps the wrong ones is twice as fast as all() with a generator.
    if isinstance(ids, list) and not [i for i in ids if i.__class__ is not int or not 0 <= i <= _MAX_TOKEN_ID]:
        return ids
    raise bad_field(name, f"a list of integers between 0 and {_MAX_TOKEN_ID}", ids)


def _not_an_object(value: Any) -> RecordError:
    return RecordError(
        Reason.NOT_AN_OBJECT,
        f"expected an object, found {type(value).__name__} {shown(value)}. Write one JSON object a line.",
    )


def _torn(error: RecordError) -> RecordError:
    return RecordError(
        Reason.TORN_LINE,
        f"expected a whole record, found the end of the file in its middle ({error.message}). Its writer was stopped: "
        "write the file again.",
    )
