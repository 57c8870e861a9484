"""What a completion becomes before encoding: texts and sampled ids in order, each inside or outside the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dflash.config import TokenizeOptions
from dflash.data.chat import template_messages
from dflash.data.records import Completion, Reason
from dflash.data.rows import RowFlag
from dflash.data.sampled import check_ids, check_sampled_text
from dflash.data.scripts import SAMPLE_CHARACTERS
from dflash.data.turns import Conversation, Turn
from dflash.errors import RecordError

if TYPE_CHECKING:
    from dflash.data.tokenizer import TargetTokenizer


# For each token of the window: encoding a prompt of so many is cheaper than building the table that shows it too long.
ENCODED_CHARACTERS = 8


class Segment(msgspec.Struct, frozen=True):
    """A piece of a row.

    Attributes:
        text: to encode; empty where `ids` is given.
        is_loss: whether the target sampled it.
        allow_special: whether text that spells a control token is that token.
        ids: ids that the record carries.
        continues: whether text of the same row stands before it.
    """

    text: str
    is_loss: bool
    allow_special: bool = True
    ids: Sequence[int] | None = None
    continues: bool = True


class RowPlan(msgspec.Struct, frozen=True):
    """A row before encoding.

    Attributes:
        segments: in order.
        flags: what is known without the ids.
        response_head: trace and answer, as much as statistics look at, or more.
        verbatim: the last response as it reads if white space that the template trimmed was sampled; None where
            nothing was trimmed.
    """

    segments: tuple[Segment, ...]
    flags: RowFlag
    response_head: str
    verbatim: Segment | None = None


def plan_row(completion: Completion, tokenizer: TargetTokenizer, options: TokenizeOptions) -> RowPlan:
    """Split a completion into segments.

    Sampled ids in the record are used as they are. Without the prompt's ids the prompt is rendered; with
    `loss_on="all_turns"` the record's own ids still decide the last turn, and earlier turns count only where the
    prompt is rendered.

    Raises:
        RecordError: the record can't be used.
    """
    message: Mapping[str, Any] = completion.messages[-1]
    ended = completion.finish_reason != "length"  # a record that doesn't say counts as ended
    segments: tuple[Segment, ...]
    verbatim = None
    if completion.output_token_ids:
        check_ids("output_token_ids", completion.output_token_ids, tokenizer.known_ids)
        flags = RowFlag.SAMPLED_IDS | check_sampled_text(completion, tokenizer)
        prompt = _prompt_segments(completion, tokenizer, options)
        segments = (*prompt, Segment("", is_loss=True, ids=completion.output_token_ids))
    else:
        flags = RowFlag(0)
        conversation = _conversation(completion, tokenizer)
        turn = conversation.turn(len(completion.messages) - 1, ended=ended)
        prompt = _prompt_segments(completion, tokenizer, options, turn)
        segments = (*prompt, *_response_segments(turn))
        message = turn.message
        verbatim = _verbatim(turn)
    if not ended:
        flags |= RowFlag.LENGTH_CUT
    if message.get("reasoning_content") and not (_text(message.get("content")).strip() or message.get("tool_calls")):
        flags |= RowFlag.THINKING_ONLY
    _require_room(segments[0], tokenizer, options)
    return RowPlan(segments, flags, _response_head(message), verbatim)


def _conversation(completion: Completion, tokenizer: TargetTokenizer) -> Conversation:
    messages = template_messages(completion.messages)
    return Conversation(
        tokenizer.template,
        tokenizer.controls,
        messages,
        completion.tools,
        completion.chat_template_kwargs,
        tokenizer.turn_programs,
    )


def _prompt_segments(
    completion: Completion, tokenizer: TargetTokenizer, options: TokenizeOptions, turn: Turn | None = None
) -> list[Segment]:
    """Everything before the last response: one segment, or more where earlier turns are inside the loss."""
    if completion.prompt_token_ids:
        check_ids("prompt_token_ids", completion.prompt_token_ids, tokenizer.known_ids)
        return [Segment("", is_loss=False, ids=completion.prompt_token_ids)]
    prompt = turn.prompt if turn else _conversation(completion, tokenizer).prompt(len(completion.messages) - 1)
    if options.loss_on == "last_turn":
        return [Segment(prompt, is_loss=False, continues=False)]
    # Before each earlier turn is rendered: a prompt that can't fit would cost time quadratic in its turns for nothing.
    _require_room(Segment(prompt, is_loss=False), tokenizer, options)
    return _chain_segments(_conversation(completion, tokenizer), prompt)


def _chain_segments(conversation: Conversation, prompt: str) -> list[Segment]:
    """Cut `prompt` at the earlier responses to the last user query.

    A turn is inside the loss only where later prompts repeat it as it was sampled: a row has one text for each turn.
    """
    segments: list[Segment] = []
    done = ""
    for index in _chain(conversation.messages):
        try:
            turn = conversation.turn(index, ended=True)
        except RecordError:  # this turn stays context
            continue
        after = turn.prompt + turn.sampled
        if prompt.startswith(after) and turn.prompt.startswith(done):
            segments += [Segment(turn.prompt[len(done) :], is_loss=False, continues=bool(done))]
            segments += _response_segments(turn)
            done = after
    return [*segments, Segment(prompt[len(done) :], is_loss=False, continues=bool(done))]


def _chain(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the assistant's messages after the last user query, the last message left out."""
    last_query = max((i for i, message in enumerate(messages) if _is_query(message)), default=-1)
    return [i for i in range(last_query + 1, len(messages) - 1) if messages[i].get("role") == "assistant"]


def _is_query(message: Mapping[str, Any]) -> bool:
    """Whether a user asks something; tool results are sometimes sent as wrapped user messages."""
    if message.get("role") != "user":
        return False
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else ""
    return not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))


def _response_segments(turn: Turn) -> list[Segment]:
    """The sampled text, cut only at the template's own control tokens, and only where the text spells some too."""
    if not turn.spells_control:
        return [Segment(turn.sampled, is_loss=True)]
    segments = []
    start = 0
    for begin, end in turn.control_spans:
        if end <= turn.sampled_end:
            segments.append(Segment(turn.response[start:begin], is_loss=True, allow_special=False))
            segments.append(Segment(turn.response[begin:end], is_loss=True))
            start = end
    segments.append(Segment(turn.response[start : turn.sampled_end], is_loss=True, allow_special=False))
    return [segment for segment in segments if segment.text]


def _verbatim(turn: Turn) -> Segment | None:
    """The response with the white space that the template trimmed put back.

    White space beside the trace and the answer replaces the template's own there; white space before the trace
    belongs to the prompt.
    """
    values = [turn.message.get(field) for field in ("reasoning_content", "content")]
    if all(not isinstance(value, str) or value == value.strip() for value in values):
        return None
    sampled, rest = "", turn.sampled
    for field in ("reasoning_content", "content"):
        value = turn.message.get(field)
        if not isinstance(value, str) or not value.strip():
            continue
        before, _, rest = rest.partition(value.strip())
        before = before.lstrip() if sampled != sampled.rstrip() else before
        leads = value != value.lstrip() and field == "content"
        sampled += (before.rstrip() if leads else before) + (value if leads else value.lstrip())
    sampled += rest.lstrip() if sampled != sampled.rstrip() else rest
    if sampled == turn.sampled:
        return None
    return Segment(sampled, is_loss=True, allow_special=not turn.spells_control)


def _response_head(message: Mapping[str, Any]) -> str:
    trace: str = message.get("reasoning_content") or ""
    return trace if len(trace) >= SAMPLE_CHARACTERS else trace + _text(message.get("content"))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def require_unicode(plan: RowPlan) -> None:
    """Refuse text that can't be encoded.

    Raises:
        RecordError: `invalid_unicode`.
    """
    for text in (segment.text for segment in plan.segments):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                Reason.INVALID_UNICODE,
                f"half of a surrogate pair, {text[error.start]!r}, at character {error.start} of the rendered text",
            ) from error


def _require_room(prompt: Segment, tokenizer: TargetTokenizer, options: TokenizeOptions) -> None:
    """Drop a prompt that can't fit without encoding it: a megabyte without a space takes seconds."""
    if len(prompt.text) <= options.max_seq_len * ENCODED_CHARACTERS:
        return
    longest = tokenizer.token_bytes.longest
    if longest is None or len(prompt.text) * 4 <= options.max_seq_len * longest:
        return
    size = tokenizer.token_bytes.normalised_size(prompt.text)
    if size > options.max_seq_len * longest:
        raise prompt_too_long(f"{size} bytes, and no token has more than {longest}", options)


def too_few_loss_tokens(found: int, options: TokenizeOptions) -> RecordError:
    """An error for a row without a run of loss tokens that is long enough."""
    return RecordError(
        Reason.TOO_FEW_LOSS_TOKENS,
        f"expected at least {options.min_loss_tokens} adjacent loss tokens within {options.max_seq_len} tokens, "
        f"found {found}",
    )


def prompt_too_long(found: str, options: TokenizeOptions) -> RecordError:
    """An error for a prompt that leaves no room for the response."""
    return RecordError(
        Reason.NO_LOSS_TOKENS_WITHIN_MAX_SEQ_LEN,
        f"expected a prompt shorter than max_seq_len={options.max_seq_len} tokens, found {found}. A prompt is never "
        f"cut on the left; raise max_seq_len to keep such records.",
    )
