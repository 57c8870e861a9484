"""One part of a batch, and its index: what is counted of each record, so that a rerun needn't read the part itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dflash.data.discovery import PARTS_PREFIX
from dflash.data.strict_json import parse_json
from dflash.errors import DamagedDatasetError, IntegrityError, ObjectNotFoundError, RecordError
from dflash.generate.looks import Look, look_at
from dflash.manifest import sha256_hex
from dflash.storage import ObjectInfo, Store

FORMAT_VERSION: Final = 1
PART_BYTES: Final = 256 << 20
# What `checked_look` and the reading of JSON before it raise for what this code never wrote.
NOT_A_RECORD: Final = (RecordError, LookupError, TypeError, AttributeError, msgspec.ValidationError)


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
class PartIndex:
    """A part and what is counted of each of its records.

    Attributes:
        part: the part.
        looks: in the order of its records.
        is_read: the part's bytes were at hand; else the index alone was, and says what they should be.
    """

    part: Part
    looks: tuple[Look, ...]
    is_read: bool

    @classmethod
    def of(cls, key: str, data: bytes, looks: Iterable[Look]) -> PartIndex:
        """The index of a part whose bytes are at hand."""
        counted = tuple(looks)
        return cls(Part(key, len(data), sha256_hex(data), len(counted)), counted, is_read=True)

    def to_bytes(self) -> bytes:
        """The index object."""
        return msgspec.json.encode({"format_version": FORMAT_VERSION, **self.part.to_json(), "records": self.looks})


def read_index(store: Store, info: ObjectInfo) -> PartIndex:
    """A part by its index, or by itself where the index is missing or isn't this part's.

    Raises:
        DamagedDatasetError: see `read_part`; or the part is empty and its index isn't, so that it ends no batch.
    """
    if not info.size:
        if _has_index(store, info.key):
            raise DamagedDatasetError(
                f"{store.uri}/{info.key} is empty, but records are counted in {_index_key(info.key)}. Put it back from "
                "a copy. Or, where there is no _SUCCESS yet and no run goes on, remove both and run again."
            )
        return read_part(store, info)
    try:
        index = parse_json(store.read(_index_key(info.key), max_bytes=PART_BYTES))
        looks = msgspec.convert(index["records"], tuple[Look, ...])
        expected = (FORMAT_VERSION, info.key, info.size, len(looks))
        if tuple(index[name] for name in ("format_version", "part", "size", "num_records")) == expected:
            return PartIndex(Part(info.key, info.size, str(index["sha256"]), len(looks)), looks, is_read=False)
    except ObjectNotFoundError:
        whole = read_part(store, info)
        put_index(store, whole)
        return whole
    except (RecordError, LookupError, TypeError, msgspec.ValidationError):
        pass
    return read_part(store, info)


def read_part(store: Store, info: ObjectInfo) -> PartIndex:
    """A part by itself.

    Raises:
        DamagedDatasetError: a line that is no record of this code; names it.
    """
    data = store.read(info.key, expect=info)
    looks: list[Look] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line:
            try:
                looks.append(checked_look(parse_json(line)))
            except NOT_A_RECORD as error:
                raise DamagedDatasetError(
                    f"{store.uri}/{info.key}, line {number}, is no record that this command wrote: {error}. "
                    "Generate into a folder of its own."
                ) from error
    return PartIndex.of(info.key, data, looks)


def checked_look(record: Any) -> Look:
    """The index line of a record.

    Raises:
        One of `NOT_A_RECORD`: it is none that this code accepts.
    """
    return msgspec.convert(look_at(record), Look)


def put_index(store: Store, index: PartIndex) -> None:
    """Keep an index beside its part."""
    try:
        store.put_if_absent(_index_key(index.part.key), index.to_bytes())
    except IntegrityError:  # another version of this code wrote it; the part itself is what counts
        return


def _has_index(store: Store, key: str) -> bool:
    try:
        store.head(_index_key(key))
    except ObjectNotFoundError:
        return False
    return True


def find_record(store: Store, part: Part, prompt_id: str) -> dict[str, Any] | None:
    """The record of an id in a part."""
    for line in store.read(part.key).split(b"\n"):
        record = parse_json(line) if line else {}
        if record.get("id") == prompt_id:
            return dict(record)
    return None


def _index_key(key: str) -> str:
    return f"{PARTS_PREFIX}{key}".removesuffix("l")
