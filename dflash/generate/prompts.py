"""One prompt: what is asked, checked when it is read.

The id decides everything: what is done, the request's seed, the record. A prompt without one gets an id from its
content (see `prompt_source`), and equal prompts without ids get `...#2`, `...#3`: they are interchangeable, so no order
is involved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from dflash.data.chat import RESERVED_KWARGS
from dflash.data.completions import optional_object
from dflash.data.messages import ROLE_ALIASES, normalise_message
from dflash.data.records import Reason, bad_field
from dflash.data.strict_json import check_finite
from dflash.errors import RecordError
from dflash.generate.config import SamplingOptions

_MAX_ID_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to make.

    Attributes:
        id: unique among the prompts.
        messages: as given; the last isn't the assistant's.
        tools: as given.
        chat_template_kwargs: the prompt's own, over those of the run.
        source: label for reports.
        sampling: fields of `SamplingOptions` that differ from the run's.
    """

    id: str
    messages: list[Any]
    tools: list[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The prompt as a line of a prompts file."""
        fields = {
            "id": self.id,
            "messages": self.messages,
            "tools": self.tools,
            "chat_template_kwargs": dict(self.chat_template_kwargs),
            "source": self.source,
            "sampling": dict(self.sampling),
        }
        return {name: value for name, value in fields.items() if value}


def digest_of(prompt_id: str) -> bytes:
    """Sixteen bytes that stand for an id, so that a million of them fit into memory."""
    return hashlib.blake2b(prompt_id.encode(), digest_size=16).digest()


def read_prompt(record: Any, *, strip_answers: bool = False) -> Prompt:
    """Check one prompt; its id is empty where the record has none.

    Raises:
        RecordError: a field has another type than documented, or a message can't be read back later.
    """
    if not isinstance(record, Mapping):
        raise RecordError(Reason.NOT_AN_OBJECT, "expected an object with id and messages")
    tools = _list_of_objects(record, "tools")
    kwargs = optional_object(record, "chat_template_kwargs")
    if reserved := RESERVED_KWARGS.intersection(kwargs):
        raise bad_field("chat_template_kwargs", "no name that rendering itself sets", sorted(reserved))
    sampling = optional_object(record, "sampling")
    if sampling:
        _check_sampling(sampling)
    source = record.get("source")
    if source is not None and not isinstance(source, str):
        raise bad_field("source", "text", source)
    return Prompt(_id(record), _messages(record, strip_answers), tools, kwargs, source, sampling)


def _id(record: Mapping[str, Any]) -> str:
    value = record.get("id", record.get("prompt_id"))
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is None:
        return ""
    if not isinstance(value, str) or not value or len(value) > _MAX_ID_CHARACTERS:
        raise bad_field("id", f"text of 1 to {_MAX_ID_CHARACTERS} characters, or none", value)
    return value


def _messages(record: Mapping[str, Any], strip_answers: bool) -> list[Any]:
    messages = record.get("messages")
    if messages is None and isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "a list of messages, or prompt as text", messages)
    if strip_answers and _is_answer(messages[-1]):
        messages = messages[:-1]  # whatever it holds: it isn't sent
    check_finite(messages, "messages")  # also in fields that only a server reads
    plain = [normalise_message(message, i, thinking_off=False) for i, message in enumerate(messages)]
    if not plain or plain[-1]["role"] == "assistant":
        raise bad_field("messages", "a last message that isn't the assistant's (see strip_answers)", len(messages))
    # As given where servers understand it: `from` and `value` are names of ours.
    return [given if "role" in given else normal for given, normal in zip(messages, plain, strict=True)]


def _is_answer(message: Any) -> bool:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return isinstance(role, str) and ROLE_ALIASES.get(role) == "assistant"


def _check_sampling(sampling: dict[str, Any]) -> None:
    if unknown := set(sampling) - set(SamplingOptions.model_fields):
        raise bad_field("sampling", f"only {', '.join(SamplingOptions.model_fields)}", sorted(unknown))
    try:
        SamplingOptions.model_validate(sampling, strict=True)  # else "5" and true would be numbers
    except ValidationError as error:
        raise bad_field("sampling", "values in range", str(error.errors()[0]["msg"])) from None


def _list_of_objects(record: Mapping[str, Any], name: str) -> list[Any] | None:
    value = record.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise bad_field(name, "a list of objects", value)
    if value:
        check_finite(value, name)
    return value or None
