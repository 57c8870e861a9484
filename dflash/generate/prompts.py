"""Prompts from JSON Lines or a dataset, each with an id of its own, read as a stream.

The id decides everything: what is done, the request's seed, the record. A prompt without one gets an id from its
content, and equal prompts without ids get `...#2`, `...#3`: they are interchangeable, so no order is involved.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from dflash.data.chat import RESERVED_KWARGS
from dflash.data.completions import optional_object
from dflash.data.lines import ReadLimits, iter_lines
from dflash.data.messages import ROLE_ALIASES, normalise_message
from dflash.data.records import Reason, bad_field
from dflash.data.strict_json import check_value, parse_json
from dflash.errors import RecordError, UsageError
from dflash.generate.config import SamplingOptions
from dflash.storage import S3Credentials, Store, open_store

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
MAX_NAMED: Final = 10  # prompts that a refusal names
_LIMITS = ReadLimits()
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


@dataclass(slots=True)
class PromptSource:
    """Prompts that can be read any number of times, always the same.

    Attributes:
        name: for messages.
        files: local files and their names.
        rows: in place of files, rows of a dataset.
        strip_answers: leave out a last assistant turn.
    """

    name: str
    files: list[tuple[Path, str]] = field(default_factory=list)
    rows: Iterable[Mapping[str, Any]] | None = None
    strip_answers: bool = False

    def __iter__(self) -> Iterator[Prompt]:
        """Read the prompts.

        Raises:
            UsageError: lines that hold no prompt; names the first ones and how many there are.
        """
        bad: list[str] = []
        num_bad = 0
        repeats: Counter[str] = Counter()
        for where, read in self._records():
            try:
                prompt = read_prompt(read(), strip_answers=self.strip_answers)
            except RecordError as error:
                num_bad += 1
                if len(bad) < MAX_NAMED:
                    bad.append(f"  {where}: {error}")
                continue
            if num_bad:
                continue
            yield prompt if prompt.id else _with_content_id(prompt, repeats)
        if num_bad:
            raise UsageError(
                f"{num_bad} lines of {self.name} hold no prompt that can be used; nothing was asked for.\n"
                f"{chr(10).join(bad)}\nCorrect or remove them."
            )

    def check(self) -> set[bytes]:
        """Read all prompts once; return the digests of their ids.

        Raises:
            UsageError: no prompt, unreadable lines, or an id that two lines share; names them.
        """
        ids: set[bytes] = set()
        twice: dict[str, list[int]] = {}
        for prompt in self:
            digest = digest_of(prompt.id)
            if digest in ids:
                twice[prompt.id] = []
            ids.add(digest)
        if twice:
            raise self._refuse_repeated(twice)
        if not ids:
            raise UsageError(f"{self.name} holds no prompts: expected JSON lines with id and messages.")
        return ids

    def _refuse_repeated(self, twice: dict[str, list[int]]) -> UsageError:
        for number, prompt in enumerate(self, 1):
            if prompt.id in twice:
                twice[prompt.id].append(number)
        named = [f"  {name!r}: prompts {', '.join(map(str, at[:5]))}" for name, at in list(twice.items())[:MAX_NAMED]]
        return UsageError(
            f"{self.name}: {len(twice)} ids belong to more than one prompt (counted from 1, blank lines left out):\n"
            f"{chr(10).join(named)}\nGive each prompt an id of its own, or none: repeated prompts without ids are kept."
        )

    def _records(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        if self.rows is not None:
            for number, row in enumerate(self.rows):
                yield f"{self.name}[{number}]", _Row(row)
            return
        for path, name in self.files:
            with path.open("rb") as file:
                for line in iter_lines(file, name, _LIMITS):
                    if line.error is not None or line.data.strip(b" \t\r\xef\xbb\xbf"):
                        yield f"{name}:{line.number}", _Parse(line.data, line.error)


@dataclass(frozen=True, slots=True)
class _Row:
    row: Mapping[str, Any]

    def __call__(self) -> Any:
        check_value(dict(self.row))
        return self.row


@dataclass(frozen=True, slots=True)
class _Parse:
    data: bytes
    error: RecordError | None

    def __call__(self) -> Any:
        if self.error is not None:
            raise self.error
        return parse_json(self.data.removeprefix(b"\xef\xbb\xbf"))


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


def open_prompts(
    name: str, folder: Path, credentials: S3Credentials | None, *, strip_answers: bool = False
) -> PromptSource:
    """Open prompts by URI or dataset name; objects are copied to `folder`.

    Raises:
        UsageError: there is nothing, or the library `datasets` isn't installed.
    """
    if name.startswith("datasets:"):
        return PromptSource(name, rows=_dataset_rows(name.removeprefix("datasets:")), strip_answers=strip_answers)
    parent, _, last = name.rstrip("/").rpartition("/")
    if last.endswith(SUFFIXES):
        store, keys = open_store(parent or ("/" if name.startswith("/") else "."), credentials), [last]
    else:
        store = open_store(name, credentials)
        keys = [item.key for item in store.list("") if item.key.endswith(SUFFIXES)]
    if not keys:
        raise UsageError(f"No prompts under {name}: expected files ending in {', '.join(SUFFIXES)}. Check the name.")
    return PromptSource(name, [(_local(store, key, folder), key) for key in keys], strip_answers=strip_answers)


def _local(store: Store, key: str, folder: Path) -> Path:
    path = store.local_path(key)
    if path is not None:
        store.head(key)  # refuses what isn't there
        return path
    info = store.head(key)
    path = folder / hashlib.sha256(f"{store.uri}/{key}:{info.etag}:{info.size}".encode()).hexdigest()
    if not path.exists():
        store.download(key, path, expect=info)
    return path


def _dataset_rows(spelled: str) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UsageError("datasets:NAME needs the library `datasets`: pip install datasets.") from error
    name, _, split = spelled.partition(":")
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:
        raise UsageError(f"The dataset {name}, split {split or 'train'}, can't be loaded: {error}") from error
    return rows


def _id(record: Mapping[str, Any]) -> str:
    value = record.get("id", record.get("prompt_id"))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
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
        SamplingOptions.model_validate(sampling)
    except ValidationError as error:
        raise bad_field("sampling", "values in range", str(error.errors()[0]["msg"])) from None


def _list_of_objects(record: Mapping[str, Any], name: str) -> list[Any] | None:
    value = record.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise bad_field(name, "a list of objects", value)
    return value or None


def _with_content_id(prompt: Prompt, repeats: Counter[str]) -> Prompt:
    content = [prompt.messages, prompt.tools, prompt.chat_template_kwargs, prompt.sampling]
    name = "p-" + hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:20]
    repeats[name] += 1
    suffix = f"#{repeats[name]}" if repeats[name] > 1 else ""
    return Prompt(name + suffix, *(getattr(prompt, item) for item in Prompt.__slots__[1:]))
