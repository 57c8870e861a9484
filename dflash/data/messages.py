"""One message in the shape that templates read, whichever of the usual shapes it came in.

Sampled text is never trimmed: only the newlines that belong to inline thinking tags go with them, as in Qwen's
template.
"""

from __future__ import annotations

from typing import Any

from dflash.data.records import Reason, bad_field, shown
from dflash.data.strict_json import check_finite, parse_json
from dflash.errors import RecordError

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TEXT_PART_TYPES = ("text", "input_text", "output_text")
OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
_PLAIN_FIELDS = frozenset({"role", "content", "reasoning_content"})


def normalise_message(message: Any, index: int, *, thinking_off: bool) -> dict[str, Any]:
    """Normalise one message; fields that aren't part of a chat request are left out, as servers leave them out.

    Args:
        message: as in the record.
        index: its place in the conversation, for error messages.
        thinking_off: the request closed the thinking block in the prompt, so that a `</think>` without an opening
            tag is part of the answer.

    Raises:
        RecordError: bad_field, unknown_role, non_text_part, conflicting_reasoning, tool_arguments_not_json,
            tool_arguments_not_object, duplicate_key or invalid_unicode.
    """
    plain = _plain(message)
    if plain is not None:
        return plain
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise bad_field(where, "an object with role and content", message)
    role = _role(message, where)
    content = _content(message, where)
    result: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise bad_field(f"{where}.{name}", "text", value)
            result[name] = value
    if role == "assistant":
        _complete_assistant(result, message, where, thinking_off=thinking_off)
    elif "content" not in message and "value" not in message:
        raise bad_field(where, "the field content", list(message))
    return result


def _plain(message: Any) -> dict[str, Any] | None:
    """A message as most are: a known role and texts under their usual names, no thinking tags to part. Else None."""
    if message.__class__ is not dict or not _PLAIN_FIELDS.issuperset(message):
        return None
    role, content = message.get("role"), message.get("content")
    if role.__class__ is not str or role not in ROLES or content.__class__ is not str:
        return None
    if role != "assistant":
        return {"role": role, "content": content}
    if "<" in content and (CLOSE_TAG in content or OPEN_TAG in content):
        return None
    trace = message.get("reasoning_content")
    if trace is None:
        return {"role": role, "content": content}
    return {"role": role, "content": content, "reasoning_content": trace} if trace.__class__ is str else None


def _complete_assistant(result: dict[str, Any], message: dict[str, Any], where: str, *, thinking_off: bool) -> None:
    content = result["content"]
    if isinstance(content, list):  # what was sampled is one text
        content = "".join(part["text"] for part in content)
    trace = _reasoning(message, where)
    if content and (CLOSE_TAG in content or OPEN_TAG in content):
        content, trace = _split_inline(content, trace, where, thinking_off=thinking_off)
    result["content"] = content
    if trace is not None:
        result["reasoning_content"] = trace
    if message.get("function_call") is not None:
        raise bad_field(f"{where}.function_call", "tool_calls in its place", message["function_call"])
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise bad_field(f"{where}.tool_calls", "a list", calls)
    if calls:
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _role(message: dict[str, Any], where: str) -> str:
    role = message.get("role")
    if role.__class__ is str and role in ROLES and message.get("from") is None:
        return str(role)
    names = [message[key] for key in ("role", "from") if message.get(key) is not None]
    if not names:
        raise bad_field(where, "the field role", list(message))
    roles = {_known_role(name, where) for name in names}
    if len(roles) > 1:
        raise bad_field(where, "one role", names)
    return roles.pop()


def _known_role(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise bad_field(f"{where}.role", "text", name)
    role = ROLE_ALIASES.get(name)
    if role is None:
        raise RecordError(
            Reason.UNKNOWN_ROLE,
            f"{where}: expected a role of {', '.join(ROLE_ALIASES)}, found {shown(name)}. "
            "It isn't guessed: name the role.",
        )
    return role


def _content(message: dict[str, Any], where: str) -> str | list[dict[str, Any]] | None:
    """Text, text parts or None; `value` is the other name of the field."""
    content = message.get("content")
    if content is None:
        content = message.get("value")
    elif message.get("value") not in (None, content):
        raise bad_field(where, "either content or value", [content, message["value"]])
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(f"{where}.content", "text, a list of text parts, or null", content)
    return [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise bad_field(where, "a part with type and text", part)
    kind = part.get("type")
    media = [key for key in ("image", "image_url", "video", "audio", "input_audio") if part.get(key) is not None]
    if media or (kind is not None and kind not in TEXT_PART_TYPES):
        raise RecordError(
            Reason.NON_TEXT_PART,
            f"{where}: expected a part of type text, found {shown(kind)} {media}. A drafter is trained on text "
            "alone: leave such conversations out.",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_field(f"{where}.text", "text", text)
    return {"type": "text", "text": text}


def _reasoning(message: dict[str, Any], where: str) -> str | None:
    """The trace of whichever field holds one; None without any such field."""
    trace: str | None = None
    for name in REASONING_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise bad_field(f"{where}.{name}", "text", value)
        if not trace or not trace.strip():
            trace = value if value.strip() or trace is None else trace
        elif value.strip() not in ("", trace.strip()):
            raise _conflict(where, name, trace, value)
    return trace


def _split_inline(text: str, trace: str | None, where: str, *, thinking_off: bool) -> tuple[str, str | None]:
    """Part the answer from a trace that is inline; at the FIRST closing tag, for later ones are part of the answer.

    A text that neither starts with the opening tag nor has a closing tag alone only talks about the tags. It gets an
    empty trace in the field, which keeps templates from splitting the text themselves.
    """
    head, closing, tail = text.partition(CLOSE_TAG)
    body = head.lstrip()
    opened = body.startswith(OPEN_TAG)
    inline = body[len(OPEN_TAG) :].strip("\n") if opened else head.strip("\n")
    known = (trace or "").strip()
    repeats = inline.strip() in ("", known)
    if opened and known and not repeats:
        raise _conflict(where, "content", trace or "", inline)
    if opened or (closing and OPEN_TAG not in head and (repeats if known else not thinking_off)):
        return tail.lstrip("\n"), trace if known else inline
    return text, "" if closing and trace is None else trace


def _conflict(where: str, name: str, trace: str, other: str) -> RecordError:
    return RecordError(
        Reason.CONFLICTING_REASONING,
        f"{where}: expected one trace, found {shown(trace)} and, in {name}, {shown(other)}. Keep what was sampled.",
    )


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """The nested form of one call; the arguments keep their keys, their order and their values."""
    if not isinstance(call, dict):
        raise bad_field(where, "an object with name and arguments", call)
    function = call if call.get("function") is None else call["function"]
    if not isinstance(function, dict):
        raise bad_field(f"{where}.function", "an object with name and arguments", function)
    if call.get("type") not in (None, "function"):
        raise bad_field(f"{where}.type", "function", call["type"])
    name, call_id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise bad_field(f"{where}.name", "the function's name", name)
    if "arguments" not in function:
        raise bad_field(where, "the field arguments", list(function))
    if call_id is not None and not isinstance(call_id, str):
        raise bad_field(f"{where}.id", "text", call_id)
    arguments = _arguments(function["arguments"], f"{where}.arguments")
    nested = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return nested if call_id is None else {"id": call_id, **nested}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Arguments as a dict; null, for a function without parameters, renders as an empty one does."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments, where)
    if not isinstance(arguments, dict):
        raise RecordError(
            Reason.TOOL_ARGUMENTS_NOT_OBJECT,
            f"{where}: expected an object, found {type(arguments).__name__} {shown(arguments)}. "
            "Log the call as the server parsed it.",
        )
    check_finite(arguments, where)
    return arguments


def _parse_arguments(text: str, where: str) -> Any:
    try:
        return parse_json(text.encode())
    except RecordError as error:
        if error.reason in (Reason.DUPLICATE_KEY, Reason.INVALID_UNICODE):
            raise RecordError(error.reason, f"{where}: {error.message}") from None
        raise RecordError(
            Reason.TOOL_ARGUMENTS_NOT_JSON,
            f"{where}: expected a JSON object as text, found {shown(text)} ({error.message}). An empty object in its "
            "place would be a call that the target did not make: leave the record out.",
        ) from None
