"""From a reply to a record, or to the reason why it is none.

A record holds what training needs and is accepted by `dflash.data.completions`. Truncated thinking is told apart: a
trace that the token limit cut is never stored as an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dflash.data.completions import ABORTED, FINISH_REASONS, normalise_record
from dflash.data.messages import CLOSE_TAG, OPEN_TAG, REASONING_FIELDS
from dflash.data.records import Reason
from dflash.errors import RecordError
from dflash.generate.requests import Request, Sampled

EMPTY: Final = "empty"
ABORTED_KIND: Final = "aborted"
_MAX_COUNT: Final = 2**53


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one try gave no record.

    Attributes:
        kind: short name that progress and reports count.
        message: for a person.
        may_retry: another try may succeed.
        is_pressure: the server says, by word or by silence, that it has too much to do.
        is_fault: the connection or the server broke; several in a row put the endpoint aside.
        is_fatal: no request can succeed; the run stops.
        other_seed: ask for another answer the next time.
        retry_after_s: what the server asked to wait.
    """

    kind: str
    message: str
    may_retry: bool = True
    is_pressure: bool = False
    is_fault: bool = False
    is_fatal: bool = False
    other_seed: bool = False
    retry_after_s: float = 0.0


def make_record(request: Request, sampled: Sampled, server: str, attempts: int) -> dict[str, Any] | Failure:
    """The record of an answer.

    Args:
        request: what was asked.
        sampled: what came.
        server: the endpoint that gave it.
        attempts: tries, this one included.
    """
    if (failure := _refuse_envelope(request, sampled, server)) is not None:
        return failure
    finish = sampled.finish_reason
    if not isinstance(finish, str) or finish.casefold() not in FINISH_REASONS:
        is_abort = isinstance(finish, str) and finish.casefold() in ABORTED
        kind = ABORTED_KIND if is_abort else "bad_reply"
        return Failure(kind, f"the server ended the response with finish_reason {finish!r:.60}", other_seed=is_abort)
    message, cut_thinking = _message(sampled, request.thinking, is_cut=FINISH_REASONS[finish.casefold()] == "length")
    record = _assemble(request, sampled, message, server) | {"attempts": attempts}
    if cut_thinking:
        record["thinking_truncated"] = True
    try:
        read_back = normalise_record(record, is_parsed=True).messages[-1]
    except RecordError as error:
        kind = EMPTY if error.reason == Reason.EMPTY_RESPONSE else f"unusable_{error.reason}"
        return Failure(kind, error.message, other_seed=True)
    if _is_empty(read_back):  # a trace without a word between its tags as well
        return Failure(EMPTY, "the response has no text, no trace and no tool call", other_seed=True)
    return record


def _refuse_envelope(request: Request, sampled: Sampled, server: str) -> Failure | None:
    """What is wrong around the message: another model's answer, counts that aren't, two traces that differ."""
    model = sampled.model
    if model != request.model and isinstance(model, str) and model and not _is_same_model(model, request.model):
        said = f"{server} was asked for the model {request.model!r:.200} and answered as {model!r:.200}"
        return Failure("other_model", f"{said}. Give `model` as the server names it.", may_retry=False, is_fatal=True)
    for count in (sampled.output_tokens, sampled.prompt_tokens):
        if count is not None and not (type(count) is int and 0 <= count < _MAX_COUNT):
            return Failure("bad_reply", f"usage: expected counts of tokens, found {count!r:.60}")
    traces = [text for name in REASONING_FIELDS if isinstance(text := sampled.message.get(name), str)]
    if len(traces) > 1 and len({text.strip() for text in traces} - {""}) > 1:
        return Failure("bad_reply", f"two traces that differ, in {' and '.join(REASONING_FIELDS)}")
    return None


def _is_same_model(found: str, asked: str) -> bool:
    """Servers leave out the owner, or add a date: `Qwen/Qwen3-8B` is `qwen3-8b`, `gpt-4o` is `gpt-4o-2024-08-06`."""
    found, asked = (name.rstrip("/").rpartition("/")[2].casefold() for name in (found, asked))
    return found == asked or found.startswith(f"{asked}-20")


def _assemble(request: Request, sampled: Sampled, message: dict[str, Any], server: str) -> dict[str, Any]:
    ids = sampled.output_token_ids
    output_tokens = sampled.output_tokens
    if output_tokens is None and isinstance(ids, list):
        output_tokens = len(ids)
    sampling = {name: value for name, value in request.sampling.model_dump().items() if value is not None}
    record = {
        "id": request.prompt.id,
        "messages": [*request.prompt.messages, message],
        "tools": list(request.tools),
        "chat_template_kwargs": dict(request.kwargs),
        "source": request.prompt.source,
        "model": request.model,
        "server": server,
        "system_fingerprint": sampled.fingerprint if isinstance(sampled.fingerprint, str) else None,
        "finish_reason": sampled.finish_reason,
        "output_tokens": output_tokens,
        "prompt_tokens": sampled.prompt_tokens,
        "output_token_ids": ids,
        "prompt_token_ids": sampled.prompt_token_ids,
        "sampling": sampling if request.seed is None else sampling | {"seed": request.seed},
        "request_hash": request.hash,
    }
    return {name: value for name, value in record.items() if value not in (None, [], {}, "")}


def _message(sampled: Sampled, thinking: bool | None, *, is_cut: bool) -> tuple[dict[str, Any], bool]:
    """The assistant's message with the trace in one field, and whether the limit cut it inside the trace.

    A server with a reasoning parser gives the trace apart; one without gives one text, to which the template's
    `<think>` in the prompt does not belong.
    """
    given = sampled.message
    content = given.get("content")
    trace = next((given[name] for name in REASONING_FIELDS if given.get(name)), None)
    calls = given.get("tool_calls") or None
    cut_thinking = False
    if isinstance(content, str) and not trace:
        head, closing, _ = content.partition(CLOSE_TAG)
        opened = head.lstrip().startswith(OPEN_TAG)
        is_trace = opened or sampled.starts_in_trace or (thinking is True and is_cut)
        if is_trace and not closing and not calls:
            trace, content = (head.lstrip().removeprefix(OPEN_TAG).lstrip("\n") if opened else content), None
            cut_thinking = is_cut
    elif trace and is_cut and not calls and not (isinstance(content, str) and content.strip()):
        content, cut_thinking = None, True
    message = {"role": "assistant", "content": content, "reasoning_content": trace, "tool_calls": calls}
    return {name: value for name, value in message.items() if value is not None or name == "content"}, cut_thinking


def _is_empty(message: dict[str, Any]) -> bool:
    texts = (message.get("content"), message.get("reasoning_content"))
    return not message.get("tool_calls") and not any(text.strip() for text in texts if text)
