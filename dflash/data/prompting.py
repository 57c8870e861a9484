"""The ids that a server prefills for a conversation, for requests that carry ids and for our own server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash.data.chat import template_messages
from dflash.data.messages import OPEN_TAG, normalise_message
from dflash.data.tokenizer import TargetTokenizer


def opens_thinking(tokenizer: TargetTokenizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether the template leaves a thinking block open at the end of a prompt: what is sampled is a trace first.

    Raises:
        RecordError: the template can't render a plain question.
    """
    question = [{"role": "user", "content": "a"}]
    text = tokenizer.template.render(question, None, kwargs, add_generation_prompt=True)
    return text.rstrip().endswith(OPEN_TAG)


def prompt_token_ids(
    tokenizer: TargetTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    kwargs: Mapping[str, Any],
) -> list[int]:
    """Ids of the rendered conversation with the header of the assistant's turn behind it.

    Raises:
        RecordError: a message or the template can't be used.
    """
    plain = [normalise_message(message, index, thinking_off=False) for index, message in enumerate(messages)]
    text = tokenizer.template.render(template_messages(plain), tools, kwargs, add_generation_prompt=True)
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)
