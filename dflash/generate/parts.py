"""A batch on the store: an append-only log of parts, each written whole, no id twice.

```
<batch>/part-00000.jsonl            records; immutable; an empty one is the end of the log
<batch>/_parts/part-00000.json      what is counted of each record; made from the part, may be made again
<batch>/_failures/run-00000.ndjson  prompts that a run gave up; each line is a prompt, so the file can be used as one
<batch>/_report.json, _report.md    spot checks
<batch>/_SUCCESS                    counts; written last
```

The next part's name is the next number, put if absent: of any number of writers one gets it. A writer that finds the
name taken reads that part, leaves its ids out of its own, and tries the number behind it. Before a part is written all
parts with smaller numbers are known, so no id can be in two of them, whoever writes and whoever is killed.

A run that has nothing left to ask closes the log in the same way: it takes the next number for an empty part. A slower
writer either was there first, and its part belongs to the batch, or finds the empty one and adds nothing. `_SUCCESS` is
written behind that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dflash.data.discovery import SUCCESS
from dflash.errors import DamagedDatasetError, IntegrityError, ObjectNotFoundError, StorageError, UsageError
from dflash.generate.looks import BatchCounts, Look
from dflash.generate.part_index import Part, PartIndex, find_record, put_index, read_index, read_part
from dflash.generate.prompts import digest_of
from dflash.generate.spool import read_lines
from dflash.storage import ObjectInfo, Store, TransferLimits

# Parts are one conditional PUT: of racing multipart uploads more than one may be told that it won.
BATCH_LIMITS: Final = TransferLimits(multipart_threshold_bytes=1 << 30)
_PART: Final = re.compile(r"part-([0-9]{5,})\.jsonl")
_READERS: Final = 16


class _Published(msgspec.Struct):
    """What is read of `_SUCCESS`."""

    parts: list[dict[str, Any]]


@dataclass(slots=True)
class BatchLog:
    """The parts of a batch, as far as this process knows them.

    Attributes:
        store: the batch's folder.
        parts: in order of their numbers.
        done: digest of each id that a part holds, and the first half of its request's hash.
        counts: of all records.
        is_closed: an empty part ends the log.
        num_own: parts that this process added.
    """

    store: Store
    parts: list[Part] = field(default_factory=list)
    done: dict[bytes, bytes] = field(default_factory=dict)
    counts: BatchCounts = field(default_factory=BatchCounts)
    is_closed: bool = False
    num_own: int = 0
    _next: int = 0
    _unread: list[Part] = field(default_factory=list)

    def load(self) -> None:
        """Read what the batch holds and this process doesn't know yet.

        Raises:
            DamagedDatasetError: an id lies in two parts, or a part can't be read; names it.
        """
        listed = [item for item in self.store.list("") if _PART.fullmatch(item.key) and _number(item.key) >= self._next]
        with ThreadPoolExecutor(_READERS) as readers:
            in_order = sorted(listed, key=lambda item: _number(item.key))
            for index in readers.map(lambda info: read_index(self.store, info), in_order):
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
            if self.is_closed or self.is_complete():
                self.load()
                self._require_known(path)
                return 0
            data = b"".join(line for line, _ in lines)
            index = PartIndex.of(self._next_key, data, (look for _, look in lines))
            try:
                self.store.put_if_absent(index.part.key, data)
            except IntegrityError:
                self._know(read_index(self.store, self._taken(index.part.key)))
                continue
            put_index(self.store, index)
            self._know(index)
            self.num_own += 1
            return len(lines)
        return 0

    def close(self) -> None:
        """Let no part be added any more; parts that another run added meanwhile are known afterwards."""
        while not self.is_closed:
            key = self._next_key
            try:
                self.store.put_if_absent(key, b"")
            except IntegrityError:
                self._know(read_part(self.store, self._taken(key)))
            else:
                self.is_closed = True

    def verify(self) -> None:
        """Read through the parts that only their indexes told of.

        Raises:
            DamagedDatasetError: bytes that aren't those of the index; names the parts.
        """
        with ThreadPoolExecutor(_READERS) as readers:
            is_whole = list(readers.map(self._is_whole, self._unread))
        damaged = [part.key for part, good in zip(self._unread, is_whole, strict=True) if not good]
        if damaged:
            raise DamagedDatasetError(
                f"{self.store.uri}: {len(damaged)} of {len(self.parts)} parts don't have the SHA-256 that they were "
                f"written with: {', '.join(damaged[:10])}. Put them back from a copy. Or, where there is no {SUCCESS} "
                "yet and no run goes on, remove each with its index below _parts/ and run again: their prompts are "
                "then asked again."
            )
        self._unread.clear()

    def _is_whole(self, part: Part) -> bool:
        try:
            self.store.verify(part.key, sha256=part.sha256)
        except IntegrityError:
            return False
        return True

    def require_published(self) -> None:
        """Hold the parts to those that `_SUCCESS` names, where it is there and this code's.

        Raises:
            DamagedDatasetError: parts are gone or changed; names them.
        """
        try:
            told = msgspec.json.decode(self.store.read(SUCCESS), type=_Published).parts
        except (ObjectNotFoundError, msgspec.MsgspecError):
            return
        known = {part.key: part.to_json() for part in self.parts}
        changed = [key for part in told if known.get(key := str(part.get("part"))) != part]
        if changed:
            raise DamagedDatasetError(
                f"{self.store.uri}: {len(changed)} of {len(told)} parts that {SUCCESS} names are gone or changed: "
                f"{', '.join(changed[:10])}. Put them back from a copy."
            )

    def first_record(self) -> dict[str, Any] | None:
        """A record of the batch, if there is any."""
        first = next((part for part in self.parts if part.num_records), None)
        if first is None:
            return None
        looks = read_index(self.store, self.store.head(first.key)).looks
        return find_record(self.store, first, looks[0]["id"])

    def find(self, prompt_id: str) -> dict[str, Any] | None:
        """The record of an id; looks through the indexes one after another."""
        for part in self.parts:
            index = read_index(self.store, self.store.head(part.key))
            if any(look["id"] == prompt_id for look in index.looks):
                return find_record(self.store, part, prompt_id)
        return None

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

    def _new_lines(self, path: Path) -> list[tuple[bytes, Look]]:
        """Lines of a file whose ids no part holds, each id once."""
        lines: dict[bytes, tuple[bytes, Look]] = {}
        for line, look in read_lines(path):
            digest = digest_of(look["id"])
            if digest not in self.done:
                lines.setdefault(digest, (line, look))
        return list(lines.values())

    def _taken(self, key: str) -> ObjectInfo:
        """The object that has the name; where there is none, the failure was another one."""
        try:
            return self.store.head(key)
        except ObjectNotFoundError:
            raise StorageError(f"{self.store.uri}/{key} could not be written whole; run this again.") from None

    @property
    def _next_key(self) -> str:
        return f"part-{self._next:05d}.jsonl"

    def _know(self, index: PartIndex) -> None:
        if self.is_closed:
            raise DamagedDatasetError(
                f"{self.store.uri}/{index.part.key} lies behind an empty part, which ends a batch. It was changed by "
                "another program: take it apart, or generate into a new folder."
            )
        for look in index.looks:
            digest = digest_of(look["id"])
            if digest in self.done:
                raise DamagedDatasetError(
                    f"{self.store.uri}: the id {look['id']!r} is in {index.part.key} and in an earlier part. The batch "
                    "was changed by another program: take it apart, or generate into a new folder."
                )
            self.done[digest] = short_hash(look["request"])
            self.counts.add(look, index.part.key)
        self._next = _number(index.part.key) + 1
        self.is_closed = not index.part.size
        if index.part.size:
            self.parts.append(index.part)
        if not index.is_read:
            self._unread.append(index.part)


def short_hash(request_hash: str) -> bytes:
    """Enough of a request's hash to notice that another request was meant."""
    return request_hash[:16].encode()


def _number(key: str) -> int:
    found = _PART.fullmatch(key)
    assert found is not None, "callers filter by the pattern"
    return int(found[1])
