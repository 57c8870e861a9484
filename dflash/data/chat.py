"""Chat templates: one rendering for every record, whatever the version of transformers.

The template is compiled by transformers' own function, so filters, sandbox and whitespace rules are the ones that
`apply_chat_template` uses. What that method does to messages before rendering changed between 4.57 and 5.x (fields
set to None, names for the reasoning), so it is done here, always the same way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

from dflash.data.template_trace import Trace, TracedTemplate
from dflash.errors import RecordError, TokenizerError

THINKING_FLAG = "enable_thinking"

# A template that asks for today's date would give other ids every day. The day on which the server rendered the
# prompt isn't in the record (unless `chat_template_kwargs` or the prompt's ids say it), so the clock stands still.
FIXED_CLOCK = datetime(2025, 1, 1, tzinfo=UTC)

# Names that rendering itself sets; a record that brings one of them asks for something else than a completion.
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})

_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: the template.
        special_tokens: names such as `bos_token` and their texts, which templates read.
        tool_source: the template for conversations with tools, where the tokenizer has one apart.
        reacts_to_thinking: whether the generation prompt depends on `enable_thinking`.

    Raises:
        TokenizerError: the template doesn't compile.
    """

    source: str
    special_tokens: Mapping[str, str]
    tool_source: str | None = None
    reacts_to_thinking: bool = field(init=False)
    _compiled: Any = field(init=False, repr=False, compare=False)
    _compiled_tools: Any = field(init=False, repr=False, compare=False)
    _replayed: TracedTemplate = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        compiled = _compile(self.source)
        object.__setattr__(self, "_compiled", compiled)
        tools = compiled if self.tool_source is None else _compile(self.tool_source)
        object.__setattr__(self, "_compiled_tools", tools)
        object.__setattr__(
            self, "_replayed", TracedTemplate(compiled, self.source, lambda names: _render(compiled, names))
        )
        object.__setattr__(self, "reacts_to_thinking", self._probe_thinking())

    @property
    def reads_clock(self) -> bool:
        """Whether prompts may hold a date, which is then `FIXED_CLOCK`'s."""
        return "strftime_now" in self.source + (self.tool_source or "")

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the templates and the special tokens they read."""
        parts = [self.source, self.tool_source, sorted(self.special_tokens.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Render `messages`, which went through `template_messages`.

        Equals `apply_chat_template(..., tokenize=False)`, except that the clock stands still.

        Raises:
            RecordError: `template_error`; the template refused the messages or failed on them.
        """
        variables = self._variables(tools, kwargs, add_generation_prompt=add_generation_prompt)
        if tools:
            return _render(self._compiled_tools, {**variables, "messages": messages})
        return self._replayed.render(messages, variables, _kind(kwargs, add_generation_prompt))

    def render_untraced(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Render messages without tools by Jinja, as `render` does.

        Raises:
            RecordError: as there.
        """
        variables = self._variables(None, kwargs, add_generation_prompt=add_generation_prompt)
        return _render(self._compiled, {**variables, "messages": messages})

    def trace(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> Trace | None:
        """What rendering messages without tools was found to be, where they have been rendered and could be traced."""
        return self._replayed.trace(messages, _kind(kwargs, add_generation_prompt))

    def _variables(
        self, tools: Sequence[Any] | None, kwargs: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> dict[str, Any]:
        variables = {"strftime_now": FIXED_CLOCK.strftime, "documents": None, **self.special_tokens, **kwargs}
        variables.update(tools=tools or None, add_generation_prompt=add_generation_prompt)
        return variables

    def turn_kwargs(self, record_kwargs: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
        """What the request that sampled `message` passed to the template.

        The record says it, else thinking was on exactly if the message has a trace, be it an empty one; templates
        that don't react to the flag get none.

        Raises:
            RecordError: `template_error`; the record sets a name that rendering itself sets.
        """
        reserved = RESERVED_KWARGS.intersection(record_kwargs)
        if reserved:
            raise RecordError(
                "template_error",
                f"chat_template_kwargs sets {', '.join(sorted(reserved))}, which rendering itself sets. Remove it.",
            )
        if not self.reacts_to_thinking or record_kwargs.get(THINKING_FLAG) is not None:
            return dict(record_kwargs)
        return {**record_kwargs, THINKING_FLAG: "reasoning_content" in message}

    def _probe_thinking(self) -> bool:
        question = [{"role": "user", "content": "a"}]
        try:
            prompts = {
                self.render(question, None, {THINKING_FLAG: value}, add_generation_prompt=True)
                for value in (True, False)
            }
        except RecordError:  # such as a template that requires a system message: it decides nothing by the flag alone
            return False
        return len(prompts) > 1


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates get them: no fields set to None, the trace also under the name `thinking`.

    Transformers 5 does both inside `apply_chat_template`, 4.57 neither.
    """
    prepared = []
    for message in messages:
        plain = {key: value for key, value in message.items() if value is not None}
        if "reasoning_content" in plain:
            plain.setdefault("thinking", plain["reasoning_content"])
        prepared.append(plain)
    return prepared


def _render(compiled: Any, variables: Mapping[str, Any]) -> str:
    try:
        text: str = compiled.render(variables)
    except _RENDER_ERRORS as error:
        raise RecordError(
            "template_error",
            f"the chat template can't render this conversation of {len(variables['messages'])} messages: "
            f"{type(error).__name__}: {error}",
        ) from error
    return text


def _kind(kwargs: Mapping[str, Any], add_generation_prompt: bool) -> tuple[Any, ...] | None:
    key = key_of(kwargs)
    return None if key is None else (add_generation_prompt, *key)


def key_of(kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Equal for equal arguments of a template; None where a value isn't a plain one."""
    kind: list[Any] = []
    for name, value in kwargs.items():
        if value.__class__ not in _PLAIN:
            return None
        kind += [name, value.__class__, value]  # 1, 1.0 and True are equal and print differently
    return tuple(kind)


_PLAIN = (str, int, float, bool, type(None))


def _compile(source: str) -> Any:
    try:
        return _compile_jinja_template(source)
    except (jinja2.TemplateError, TypeError) as error:
        raise TokenizerError(
            f"The chat template doesn't compile: {type(error).__name__}: {error}. Take the template that the "
            f"server uses."
        ) from error
