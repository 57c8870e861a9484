"""A batch on the store: an append-only log of parts, each written whole, no id twice.

```
<batch>/part-00000.jsonl            records; immutable
<batch>/_parts/part-00000.json      what is counted of each record; made from the part, may be made again
<batch>/_failures/run-00000.ndjson  prompts that a run gave up; each line is a prompt, so the file can be used as one
<batch>/_report.json, _report.md    spot checks
<batch>/_SUCCESS                    counts; written last
```

The next part's name is the next number, put if absent: of any number of writers one gets it. A writer that finds the
name taken reads that part, leaves its ids out of its own, and tries the number behind it. Before a part is written all
parts with smaller numbers are known, so no id can be in two of them, whoever writes and whoever is killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dflash.data.discovery import PARTS_PREFIX, SUCCESS
from dflash.data.strict_json import parse_json
from dflash.errors import (
    DamagedDatasetError,
    IntegrityError,
    ObjectNotFoundError,
    RecordError,
    StorageError,
    UsageError,
)
from dflash.generate.looks import BatchCounts, Look, look_at
from dflash.generate.prompts import digest_of
from dflash.generate.spool import read_lines
from dflash.manifest import sha256_hex
from dflash.storage import ObjectInfo, Store, TransferLimits

FORMAT_VERSION: Final = 1
# Parts are one conditional PUT: of racing multipart uploads more than one may be told that it won.
BATCH_LIMITS: Final = TransferLimits(multipart_threshold_bytes=1 << 30)
PART_BYTES: Final = 256 << 20
_PART: Final = re.compile(r"part-(\d{5,})\.jsonl")
_READERS: Final = 16


@dataclass(frozen=True, slots=True)
class Part:
    """A part on the store."""

    key: str
    size: int
    sha256: str
    num_records: int

    def to_json(self) -> dict[str, Any]:
        """Entry of `_SUCCESS`."""
        return {"part": self.key, "size": self.size, "sha256": self.sha256, "num_records": self.num_records}


@dataclass(frozen=True, slots=True)
class _PartIndex:
    """A part and what is counted of each of its records."""

    part: Part
    looks: tuple[Look, ...]

    def to_bytes(self) -> bytes:
        """The index object."""
        return msgspec.json.encode({"format_version": FORMAT_VERSION, **self.part.to_json(), "records": self.looks})


@dataclass(slots=True)
class BatchLog:
    """The parts of a batch, as far as this process knows them.

    Attributes:
        store: the batch's folder.
        parts: in order of their numbers.
        done: digest of each id that a part holds, and the first half of its request's hash.
        counts: of all records.
    """

    store: Store
    parts: list[Part] = field(default_factory=list)
    done: dict[bytes, bytes] = field(default_factory=dict)
    counts: BatchCounts = field(default_factory=BatchCounts)
    _next: int = 0

    def load(self) -> None:
        """Read what the batch holds and this process doesn't know yet.

        Raises:
            DamagedDatasetError: an id lies in two parts, or a part can't be read; names it.
        """
        listed = [item for item in self.store.list("") if _PART.fullmatch(item.key) and _number(item.key) >= self._next]
        with ThreadPoolExecutor(_READERS) as readers:
            for index in readers.map(self._read, sorted(listed, key=lambda item: _number(item.key))):
                self._know(index)

    def is_complete(self) -> bool:
        """Whether `_SUCCESS` is there."""
        try:
            self.store.head(SUCCESS)
        except ObjectNotFoundError:
            return False
        return True

    def append(self, path: Path) -> int:
        """Make a spooled file the next part; return how many of its records were new.

        Raises:
            StorageError: the part could not be written; the file is still there.
            UsageError: another run has completed the batch without these records.
        """
        while lines := self._new_lines(path):
            if self.is_complete():
                self.load()
                self._require_known(path)
                return 0
            data = b"".join(line for line, _ in lines)
            key = f"part-{self._next:05d}.jsonl"
            try:
                self.store.put_if_absent(key, data)
            except IntegrityError:
                self._know(self._read(self._taken(key)))
                continue
            part = Part(key, len(data), sha256_hex(data), len(lines))
            index = _PartIndex(part, msgspec.convert([look_at(record) for _, record in lines], tuple[Look, ...]))
            self._put_index(index)
            self._know(index)
            return len(lines)
        return 0

    def _require_known(self, path: Path) -> None:
        if lines := self._new_lines(path):
            raise UsageError(
                f"{self.store.uri} was completed by another run, without {len(lines)} records that wait in {path}. "
                "Others may have read it: generate into a new folder."
            )

    def put_failures(self, data: bytes) -> str:
        """Keep the list of a run's failed prompts under the next number; return its key."""
        number = len(self._failure_lists())
        while True:
            key = f"_failures/run-{number:05d}.ndjson"
            try:
                self.store.put_if_absent(key, data)
            except IntegrityError:
                number += 1
                continue
            return key

    def last_failures(self) -> str | None:
        """Key of the latest list of failed prompts."""
        lists = self._failure_lists()
        return lists[-1] if lists else None

    def put_success(self, summary: Mapping[str, Any]) -> bool:
        """Write `_SUCCESS`; False where another run has written its own."""
        try:
            return self.store.put_if_absent(
                SUCCESS, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
            )
        except IntegrityError:
            return False

    def _failure_lists(self) -> list[str]:
        return [item.key for item in self.store.list("_failures")]

    def _new_lines(self, path: Path) -> list[tuple[bytes, dict[str, Any]]]:
        """Lines of a file whose ids no part holds, each id once."""
        lines: dict[bytes, tuple[bytes, dict[str, Any]]] = {}
        for line, record in read_lines(path):
            digest = digest_of(record["id"])
            if digest not in self.done:
                lines.setdefault(digest, (line, record))
        return list(lines.values())

    def _taken(self, key: str) -> ObjectInfo:
        """The object that has the name; where there is none, the failure was another one."""
        try:
            return self.store.head(key)
        except ObjectNotFoundError:
            raise StorageError(f"{self.store.uri}/{key} could not be written whole; run this again.") from None

    def _read(self, info: ObjectInfo) -> _PartIndex:
        """A part by its index, or by itself where the index is missing or isn't this part's."""
        try:
            index = parse_json(self.store.read(_index_key(info.key), max_bytes=PART_BYTES))
            looks = msgspec.convert(index["records"], tuple[Look, ...])
            expected = (FORMAT_VERSION, info.key, info.size, len(looks))
            if tuple(index[name] for name in ("format_version", "part", "size", "num_records")) == expected:
                return _PartIndex(Part(info.key, info.size, str(index["sha256"]), len(looks)), looks)
        except ObjectNotFoundError:
            whole = self._read_whole(info)
            self._put_index(whole)
            return whole
        except (RecordError, LookupError, TypeError, msgspec.ValidationError):
            pass
        return self._read_whole(info)

    def _read_whole(self, info: ObjectInfo) -> _PartIndex:
        data = self.store.read(info.key, expect=info)
        looks: list[Look] = []
        for number, line in enumerate(data.split(b"\n"), 1):
            if line:
                try:
                    looks.append(msgspec.convert(look_at(parse_json(line)), Look))
                except (RecordError, LookupError, TypeError, AttributeError, msgspec.ValidationError) as error:
                    raise DamagedDatasetError(
                        f"{self.store.uri}/{info.key}, line {number}, is no record that this command wrote: {error}. "
                        "Generate into a folder of its own."
                    ) from error
        return _PartIndex(Part(info.key, info.size, sha256_hex(data), len(looks)), tuple(looks))

    def _put_index(self, index: _PartIndex) -> None:
        try:
            self.store.put_if_absent(_index_key(index.part.key), index.to_bytes())
        except IntegrityError:  # another version of this code wrote it; the part itself is what counts
            return

    def _know(self, index: _PartIndex) -> None:
        for look in index.looks:
            digest = digest_of(look["id"])
            if digest in self.done:
                raise DamagedDatasetError(
                    f"{self.store.uri}: the id {look['id']!r} is in {index.part.key} and in an earlier part. The batch "
                    "was changed by another program: take it apart, or generate into a new folder."
                )
            self.done[digest] = short_hash(look["request"])
            self.counts.add(look, index.part.key)
        self.parts.append(index.part)
        self._next = _number(index.part.key) + 1


def short_hash(request_hash: str) -> bytes:
    """Enough of a request's hash to notice that another request was meant."""
    return request_hash[:16].encode()


def _number(key: str) -> int:
    found = _PART.fullmatch(key)
    assert found is not None, "callers filter by the pattern"
    return int(found[1])


def _index_key(key: str) -> str:
    return f"{PARTS_PREFIX}{key}".removesuffix("l")
