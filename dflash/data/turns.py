"""One assistant turn as two texts: what the server prefilled and what the target sampled.

Prompt and response come from two renders: the history with the generation prompt, and the whole conversation. What
the second adds to the first is the response. Role markers are never searched for: they may stand in anybody's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dflash.data.chat import THINKING_FLAG, ChatTemplate, key_of
from dflash.data.control_tokens import ControlTokens
from dflash.data.template_trace import probed, require_same, shape_of
from dflash.data.turn_program import TEXT_FIELDS, Shape, TurnProgram, TurnPrograms, TurnTexts
from dflash.errors import RecordError

# Rendered in place of a trace or an answer to see what the template puts around it.
SENTINEL = "\ue001dflash\ue002"
_FIRST_CHARACTERS = 48
_PRINTED_FIELDS = frozenset({"role", "content", "reasoning_content", "thinking"})


class Turn(msgspec.Struct, frozen=True):
    """An assistant turn.

    Attributes:
        message: the message, its content moved to the trace where only a trace was sampled.
        prompt: what the server prefilled, generation prompt included.
        response: what the template prints after it.
        sampled_end: end of what the target sampled in `response`: behind the end-of-turn token if the turn ended,
            else behind the last text before it.
        control_spans: control tokens that the template itself wrote into `response`.
        spells_control: whether the turn's own text spells a control token.
    """

    message: Mapping[str, Any]
    prompt: str
    response: str
    sampled_end: int
    control_spans: tuple[tuple[int, int], ...]
    spells_control: bool

    @property
    def sampled(self) -> str:
        """Text of what the target sampled."""
        return self.response[: self.sampled_end]


class Conversation(msgspec.Struct, frozen=True):
    """A normalised conversation with what renders it.

    Attributes:
        messages: from `template_messages`.
        kwargs: `chat_template_kwargs` of the record.
        programs: of turns like these; for conversations of one template and vocabulary.
    """

    template: ChatTemplate
    controls: ControlTokens
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    kwargs: Mapping[str, Any]
    programs: TurnPrograms = msgspec.field(default_factory=TurnPrograms)

    def prompt(self, index: int) -> str:
        """What the server prefilled before message `index` was sampled."""
        kwargs = self.template.turn_kwargs(self.kwargs, self.messages[index])
        return self.template.render(self.messages[:index], self.tools, kwargs, add_generation_prompt=True)

    def turn(self, index: int, *, ended: bool) -> Turn:
        """Split the assistant message `index`; `ended` says whether the end-of-turn token was sampled.

        Raises:
            RecordError: `template_error`; the render of the response doesn't continue the prompt's, or lacks text
                of the message.
        """
        message = self._as_sampled(self.messages[index], ended=ended)
        kwargs = self.template.turn_kwargs(self.kwargs, message)
        render = _TurnRender(self, self.messages[:index], kwargs)
        texts = render.replayed(message)
        if texts is None:
            split = render.split(message)
            render.learn(message, split)
        else:
            split = _Split(texts.prompt, texts.response, (texts.terminator,), texts.terminator, spells_control=False)
        end = split.terminator
        if ended:
            sampled_end = end[1] if end else len(split.response)
        else:
            sampled_end = render.cut_end(message, split, end[0] if end else len(split.response))
        return Turn(message, split.prompt, split.response, sampled_end, split.spans, split.spells_control)

    def _as_sampled(self, message: Mapping[str, Any], *, ended: bool) -> Mapping[str, Any]:
        """`message`, its content moved to the trace where only a trace can have been sampled.

        A request with thinking on that was cut before the trace's end has no closing tag, so some servers return
        the trace as content.
        """
        thinking = self.template.reacts_to_thinking and self.kwargs.get(THINKING_FLAG) is True
        if ended or not thinking or message.get("reasoning_content") or message.get("tool_calls"):
            return message
        content = message.get("content")
        if not isinstance(content, str):
            return message
        return {**message, "reasoning_content": content, "thinking": content, "content": ""}


class _Split(msgspec.Struct, frozen=True):
    """Prompt and response of a turn, and where control tokens of the template's are in the response.

    Attributes:
        terminator: the one that ends the turn, if there is one.
    """

    prompt: str
    response: str
    spans: tuple[tuple[int, int], ...]
    terminator: tuple[int, int] | None
    spells_control: bool

    @property
    def texts(self) -> TurnTexts | None:
        """The same as a program would say it; None where one can't: then the end-of-turn token isn't the only one."""
        if self.terminator is None or self.spans != (self.terminator,):
            return None
        return TurnTexts(self.prompt, self.response, self.terminator)


class _TurnRender(msgspec.Struct, frozen=True):
    """Renders of one turn, and of variants of its message behind the same prompt."""

    conversation: Conversation
    history: Sequence[Mapping[str, Any]]
    kwargs: Mapping[str, Any]

    def replayed(self, message: Mapping[str, Any]) -> TurnTexts | None:
        """The turn by a program; None where none fits, or where the message spells a control token.

        Raises:
            TokenizerError: the program gives other texts than Jinja.
        """
        programs, controls = self.conversation.programs, self.conversation.controls
        shape = self._shape(message)
        if shape is None or not programs.has(shape[0]):
            return None
        for name in TEXT_FIELDS:
            text = message.get(name)
            if text is not None and controls.spelled_in_text(text):
                return None
        found = programs.replay(*shape)
        if found is not None and programs.takes_check():
            prompt, full = (
                self.conversation.template.render_untraced(messages, self.kwargs, add_generation_prompt=add)
                for messages, add in ((self.history, True), ([*self.history, message], False))
            )
            require_same(found.prompt, prompt, self.history)
            require_same(found.prompt + found.response, full, [*self.history, message])
        return found

    def learn(self, message: Mapping[str, Any], split: _Split) -> None:
        """Make a program of a turn that was rendered, if it is as plain as that and proves right on probes."""
        programs, template = self.conversation.programs, self.conversation.template
        shape = self._shape(message)
        if shape is None or split.spells_control or not programs.has_room:
            return
        prompt = template.trace(self.history, self.kwargs, add_generation_prompt=True)
        full = template.trace([*self.history, message], self.kwargs, add_generation_prompt=False)
        if prompt is None or full is None:
            return
        programs.note_attempt()
        program = TurnProgram.of(prompt, full, message, self.conversation.controls)
        if program is not None and program.replay(shape[1]) == split.texts and self._holds(program, message):
            programs.add(shape[0], program)

    def _holds(self, program: TurnProgram, message: Mapping[str, Any]) -> bool:
        """Whether the program makes what rendering makes wherever it claims a turn with probes as its texts."""
        for *history, last in probed([*self.history, message]):
            render = _TurnRender(self.conversation, history, self.kwargs)
            shape = render._shape(last)
            found = None if shape is None else program.replay(shape[1])
            if found is None or self.conversation.controls.spelled_in(last):
                continue
            try:
                if found != render.split(last).texts:
                    return False
            except RecordError:
                return False
        return True

    def _shape(self, message: Mapping[str, Any]) -> tuple[Shape, list[str]] | None:
        """What decides which program fits, and the texts; None for what programs don't cover."""
        key = None if self.conversation.tools else key_of(self.kwargs)
        shape = None if key is None else shape_of([*self.history, message])
        return None if shape is None else ((key, shape[0]), shape[1])

    def split(self, message: Mapping[str, Any]) -> _Split:
        """Split the turn by rendering it.

        Raises:
            RecordError: see `Conversation.turn`.
        """
        controls = self.conversation.controls
        prompt = self.conversation.template.render(
            self.history, self.conversation.tools, self.kwargs, add_generation_prompt=True
        )
        response = self._response(message, prompt)
        _require_printed(message, response)
        spans = controls.spans(response)
        terminator = _terminator(spans, response)
        spells_control = not _is_only_terminator(spans, terminator, message, response) and controls.spelled_in(
            dict(message)
        )
        if spells_control:
            spans = self._template_controls(message, prompt, response)
            terminator = _terminator(spans, response)
        return _Split(prompt, response, tuple(spans), terminator, spells_control)

    def _response(self, message: Mapping[str, Any], prompt: str) -> str:
        """What the template prints for `message` after the prompt."""
        full = self._full(message)
        if full.startswith(prompt):
            return full[len(prompt) :]
        return full[self._header_end(message, prompt, full) :]

    def _template_controls(self, message: Mapping[str, Any], prompt: str, response: str) -> list[tuple[int, int]]:
        """Control tokens that the template wrote, where the message's own text spells some too."""
        controls = self.conversation.controls
        masked = self._response(controls.masked(dict(message)), prompt)
        if len(masked) != len(response):
            raise RecordError(
                "template_error",
                "the response spells control tokens and the template changes their text, so they can't be told "
                "from its own. Record output_token_ids for such completions.",
            )
        return controls.spans(masked)

    def cut_end(self, message: Mapping[str, Any], split: _Split, end: int) -> int:
        """End of the sampled text of a response that was cut, at most `end`, the template's end-of-turn token."""
        if message.get("tool_calls"):
            return end
        field = "content" if _text(message.get("content")).strip() else "reasoning_content"
        response = split.response
        if response[:end].endswith(_text(message.get(field)).strip()):
            return end
        parts = self._response({**message, **_fields(field, SENTINEL)}, split.prompt).split(SENTINEL)
        after = parts[-1]
        if len(parts) < 2 or not response.endswith(after):
            raise RecordError(
                "template_error",
                f"the response was cut inside {field}, but what the template prints after that can't be found. "
                f"Record output_token_ids for such completions.",
            )
        return len(response) - len(after)

    def _full(self, message: Mapping[str, Any]) -> str:
        conversation = self.conversation
        return conversation.template.render(
            [*self.history, message], conversation.tools, self.kwargs, add_generation_prompt=False
        )

    def _header_end(self, message: Mapping[str, Any], prompt: str, full: str) -> int:
        """Where the response starts in a render that doesn't continue the prompt.

        Some templates prefill a closed, empty trace when thinking is off, but don't print it for the answer. The
        response then starts behind the turn's header, which a render with a sentinel for the answer shows.
        """
        bare = self._full({"role": "assistant", "content": SENTINEL})
        header = bare[: bare.index(SENTINEL)] if SENTINEL in bare else None
        thinking_off = self.kwargs.get(THINKING_FLAG) is False and not message.get("reasoning_content")
        if header and thinking_off and prompt.startswith(header) and full.startswith(header):
            return len(header)
        raise RecordError("template_error", _difference(prompt, full))


def _require_printed(message: Mapping[str, Any], response: str) -> None:
    """Refuse a response that lacks text of the message: the target sampled it, so the ids would be wrong."""
    for field in ("reasoning_content", "content"):
        value = message.get(field)
        texts = [value] if isinstance(value, str) else [_text([part]) for part in value or ()]
        for text in texts:
            if not _is_part(text.strip(), response):
                raise RecordError(
                    "template_error",
                    f"the chat template doesn't print the {field} of the last turn as it is: "
                    f"{text.strip()[:60]!r} is not in its render {response[:60]!r}. The target sampled it, so use the "
                    f"template of the server that sampled it, or record output_token_ids.",
                )
    for call in message.get("tool_calls") or ():
        name = call.get("function", call).get("name")
        if str(name) not in response:
            raise RecordError(
                "template_error",
                f"the chat template doesn't print the last turn's call of {name!r}. The target sampled it, so use the "
                f"template of the server that sampled it, or record output_token_ids.",
            )


def _is_only_terminator(
    spans: Sequence[tuple[int, int]], terminator: tuple[int, int] | None, message: Mapping[str, Any], response: str
) -> bool:
    """Whether the response's one control token ends it, and isn't the end of the message's own text.

    The response holds the message's texts (`_require_printed`), so they then spell none: a look at one text's end in
    place of a search through all of them. Texts in other fields are left to the search.
    """
    if terminator is None or len(spans) > 1 or not _PRINTED_FIELDS.issuperset(message):
        return False
    token = response[terminator[0] : terminator[1]]
    return not any(_text(message.get(field)).rstrip().endswith(token) for field in ("reasoning_content", "content"))


def _is_part(part: str, text: str) -> bool:
    """Whether `text` holds `part`: looks where the first characters of a long part are before it looks everywhere."""
    at = text.find(part[:_FIRST_CHARACTERS])
    return at >= 0 and (text.startswith(part, at) or part in text)


def _terminator(spans: Sequence[tuple[int, int]], response: str) -> tuple[int, int] | None:
    """The control token that ends the turn: the template's last one, with nothing but white space after it."""
    if spans and not response[spans[-1][1] :].strip():
        return spans[-1]
    return None


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


def _fields(field: str, value: str) -> dict[str, str]:
    return {field: value} if field == "content" else {field: value, "thinking": value}


def _difference(prompt: str, full: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b), min(len(prompt), len(full)))
    start = max(at - 20, 0)
    return (
        "the render of the response doesn't continue the prompt's, so what was sampled can't be told: at character "
        f"{at} the prompt has {prompt[start : at + 40]!r}, the conversation has {full[start : at + 40]!r}. Check "
        f"chat_template_kwargs (such as {THINKING_FLAG}) and the template, or record output_token_ids."
    )
