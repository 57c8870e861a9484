"""Prompts as a stream that can be read again: files on a store, or rows of a dataset; each with an id of its own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dflash.data.lines import ReadLimits, iter_lines
from dflash.data.strict_json import check_value, parse_json
from dflash.errors import RecordError, UsageError
from dflash.generate.prompts import Prompt, digest_of, read_prompt
from dflash.storage import S3Credentials, Store, open_store, parse_uri

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
MAX_NAMED: Final = 10  # prompts that a refusal names
_LIMITS = ReadLimits()


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
        # A batch's own folder may be asked again (`strip_answers`): its lists in _failures/ aren't more prompts.
        listed = [item.key for item in store.list("") if item.key.endswith(SUFFIXES)]
        keys = [key for key in listed if not any(name.startswith("_") for name in key.split("/"))]
    if not keys:
        raise UsageError(f"No prompts under {name}: expected files ending in {', '.join(SUFFIXES)}. Check the name.")
    return PromptSource(name, [(_local(store, key, folder), key) for key in keys], strip_answers=strip_answers)


def require_apart(prompts: str, batch: str) -> None:
    """Refuse a batch that would be read as prompts when its run goes on.

    Raises:
        UsageError: its folder is that of the prompts, or lies in it.
    """
    if prompts.startswith("datasets:") or prompts.endswith(SUFFIXES):
        return
    outer = parse_uri(prompts).uri.rstrip("/")
    if f"{parse_uri(batch).uri}/".startswith(f"{outer}/"):
        raise UsageError(
            f"The batch {batch} lies in the folder of the prompts, {prompts}: the next run would take its records for "
            "prompts. Give it a folder beside them."
        )


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
    except Exception as error:  # the library has its own, and lets those of its readers and of the hub through
        raise UsageError(f"The dataset {name}, split {split or 'train'}, can't be loaded: {error}") from error
    return rows


def _with_content_id(prompt: Prompt, repeats: Counter[str]) -> Prompt:
    content = [prompt.messages, prompt.tools, prompt.chat_template_kwargs, prompt.sampling]
    name = "p-" + hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:20]
    repeats[name] += 1
    suffix = f"#{repeats[name]}" if repeats[name] > 1 else ""
    return Prompt(name + suffix, *(getattr(prompt, item) for item in Prompt.__slots__[1:]))
