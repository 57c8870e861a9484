"""Prompts to evaluate on: read from JSON Lines, rendered with the target's own chat template."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dflash.data.chat import THINKING_FLAG, template_messages
from dflash.data.lines import ReadLimits, iter_lines
from dflash.data.messages import normalise_message
from dflash.data.records import bad_field
from dflash.data.sampled import check_ids
from dflash.data.strict_json import parse_json
from dflash.data.tokenizer import TargetTokenizer
from dflash.errors import RecordError, UsageError
from dflash.storage import S3Credentials, Store, open_store

MAX_FILE_BYTES: Final = 1 << 30
SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_NO_SOURCE: Final = "(none)"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to evaluate on.

    Attributes:
        id: of the record that it comes from.
        source: group of its report.
        ids: its tokens, up to where the target begins to write.
        thinking: `enable_thinking` as the template got it; None where nobody said, which is the template's default.
    """

    id: str
    source: str
    ids: tuple[int, ...]
    thinking: bool | None = None


def read_prompts(
    uri: str,
    tokenizer: TargetTokenizer,
    template_kwargs: Mapping[str, Any],
    limit: int | None = None,
    credentials: S3Credentials | None = None,
) -> list[Prompt]:
    """Read prompts; where a record ends with an assistant's message, the prompt is what comes before that.

    Args:
        uri: one file, or a folder of files; local or `s3://`.
        tokenizer: the target's.
        template_kwargs: for the template, where a record's `chat_template_kwargs` doesn't say.
        limit: at most so many, in turn from each source so that none is left out.
        credentials: for S3.

    Raises:
        UsageError: there are none, two have one id, or a record can't be used; names file and line.
    """
    found: dict[str, Prompt] = {}
    for where, data in _records(uri, credentials):
        try:
            prompt = _prompt(data, where, tokenizer, template_kwargs)
        except RecordError as error:
            raise UsageError(f"{where} is no prompt to evaluate on: {error}") from error
        if prompt.id in found:
            raise UsageError(f"{where} repeats the id {prompt.id!r}: each prompt needs an id of its own.")
        found[prompt.id] = prompt
    if not found:
        raise UsageError(f"{uri} holds no prompts. Expected records with `messages` in files {', '.join(SUFFIXES)}.")
    return _in_turn(list(found.values()))[:limit]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 (hex) over ids, sources and tokens: equal digests mean the same evaluation set."""
    digest = hashlib.sha256()
    for prompt in sorted(prompts, key=lambda one: one.id):
        digest.update(json.dumps([prompt.id, prompt.source, prompt.ids]).encode() + b"\n")
    return digest.hexdigest()


def thinking_counts(prompts: Sequence[Prompt]) -> dict[str, int]:
    """How many prompts had thinking on, off, or left it to the template."""
    names = {True: "on", False: "off", None: "template default"}
    return dict(sorted(Counter(names[prompt.thinking] for prompt in prompts).items()))


def _records(uri: str, credentials: S3Credentials | None) -> Iterator[tuple[str, bytes]]:
    for store, key in _files(uri, credentials):
        with tempfile.TemporaryFile() as file:  # the size on disk tells a decompression bomb
            file.write(store.read(key, max_bytes=MAX_FILE_BYTES))
            file.seek(0)
            for line in iter_lines(file, key, ReadLimits()):
                where = f"{store.uri}/{key}:{line.number}"
                if line.error is not None:
                    raise UsageError(f"{where} can't be read: {line.error}")
                content = line.data.removeprefix(b"\xef\xbb\xbf") if line.number == 1 else line.data
                if content.strip():
                    yield where, content


def _files(uri: str, credentials: S3Credentials | None) -> list[tuple[Store, str]]:
    folder, _, name = uri.rstrip("/").rpartition("/")
    if name.endswith(SUFFIXES):
        return [(open_store(folder or ("/" if uri.startswith("/") else "."), credentials), name)]
    store = open_store(uri, credentials)
    return [(store, info.key) for info in store.list() if info.key.endswith(SUFFIXES)]


def _prompt(data: bytes, where: str, tokenizer: TargetTokenizer, template_kwargs: Mapping[str, Any]) -> Prompt:
    record = parse_json(data)
    if not isinstance(record, dict):
        raise bad_field("the record", "an object with messages", record)
    kwargs = {**template_kwargs, **_optional(record, "chat_template_kwargs", dict, {})}
    if not isinstance(kwargs.get(THINKING_FLAG), bool | None):
        raise bad_field(f"chat_template_kwargs.{THINKING_FLAG}", "true or false", kwargs[THINKING_FLAG])
    name, source = (_optional(record, field, str, None) for field in ("id", "source"))
    ids = _optional(record, "prompt_token_ids", list, None)
    if ids:
        check_ids("prompt_token_ids", ids, tokenizer.known_ids)
    else:
        ids, kwargs = _render(record, tokenizer, kwargs)
    return Prompt(name or where, source or _NO_SOURCE, tuple(ids), kwargs.get(THINKING_FLAG))


def _render(
    record: Mapping[str, Any], tokenizer: TargetTokenizer, kwargs: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    raw = record.get("messages")
    if not isinstance(raw, list) or not raw:
        raise bad_field("messages", "a list of at least one message", raw)
    off = kwargs.get(THINKING_FLAG) is False
    messages = [normalise_message(message, index, thinking_off=off) for index, message in enumerate(raw)]
    # Refuses what rendering itself sets; what the message of the answer says about thinking counts as in training.
    answer = messages.pop() if messages[-1]["role"] == "assistant" else None
    said = tokenizer.template.turn_kwargs(kwargs, answer or {})
    if answer is None and THINKING_FLAG not in kwargs:
        said.pop(THINKING_FLAG, None)
    if not messages:
        raise bad_field("messages", "a message before the assistant's", raw)
    tools = _optional(record, "tools", list, None)
    text = tokenizer.template.render(template_messages(messages), tools, said, add_generation_prompt=True)
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    if not ids:
        raise bad_field("messages", "a conversation that renders to some text", text)
    return ids, said


def _optional(record: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = record.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise bad_field(name, f"a {kind.__name__}", value)
    return value


def _in_turn(prompts: list[Prompt]) -> list[Prompt]:
    """Order prompts so that any number of the first ones is spread evenly over the sources."""
    seen: Counter[str] = Counter()
    places = []
    for prompt in prompts:
        places.append(seen[prompt.source])
        seen[prompt.source] += 1
    return [prompt for _, prompt in sorted(zip(places, prompts, strict=True), key=lambda pair: pair[0])]
