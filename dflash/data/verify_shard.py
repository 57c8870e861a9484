"""Re-read one shard, every row of it, against its manifest entry and its index."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.data.quality_report import printable
from dflash.data.shards import INDEX_SCHEMA, SHARD_SCHEMA, content_hashes, read_batches, read_index
from dflash.data.without_pandas import to_numpy
from dflash.errors import DatasetError
from dflash.manifest import ShardEntry

MAX_ROWS_NAMED: Final = 5
_MAX_ID_CHARS: Final = 80
# A flipped bit in a length makes Arrow ask for 2^48 bytes, or find a type that it doesn't know.
_UNREADABLE: Final = (DatasetError, pa.ArrowException, OSError)
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """One difference: where it is, what should be there and what is."""

    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


def verify_shard(
    path: Path, entry: ShardEntry, *, index_path: Path | None = None, vocab_size: int | None = None
) -> list[Problem]:
    """Compare a shard with what the manifest says about it.

    Args:
        path: the shard's file.
        entry: its entry in the manifest.
        index_path: its index; None leaves out what only the index can confirm.
        vocab_size: ids must be below; None leaves that out.

    Returns:
        Every kind of difference, with the first rows that have it; empty for a sound shard.
    """
    problems = _verify_file(path, entry.key, entry.sha256, entry.num_bytes)
    index = None
    if index_path is not None:
        problems += _verify_file(index_path, entry.index_key, entry.index_sha256, entry.index_bytes)
        try:
            stored = read_index(index_path)
            stored.validate(full=True)  # before anything follows its offsets
            index = stored.combine_chunks()
        except _UNREADABLE as error:
            problems.append(Problem(entry.index_key, "a readable index", str(error)))
    check = _ShardCheck(entry, index, vocab_size)
    try:
        for batch in read_batches(path, SHARD_SCHEMA):
            batch.validate(full=True)
            check.add(batch)
    except _UNREADABLE as error:
        return [*problems, *check.problems(whole=False), Problem(entry.key, "a readable shard", str(error))]
    return [*problems, *check.problems(whole=True)]


def _verify_file(path: Path, key: str, sha256: str, size: int) -> list[Problem]:
    try:
        found_size = path.stat().st_size
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return [Problem(key, "a readable file", f"{type(error).__name__}: {error.strerror}")]
    problems = []
    if found_size != size:
        problems.append(Problem(f"{key} size", f"{size:,} bytes", f"{found_size:,} bytes"))
    if found != sha256:
        problems.append(Problem(f"{key} SHA-256", sha256, found))
    return problems


@dataclass(slots=True)
class _Difference:
    """Rows that differ in one respect; only the first few are kept by number."""

    expected: str
    found: str
    rows: list[str] = field(default_factory=list)
    num_rows: int = 0


class _ShardCheck:
    """Takes the record batches of a shard in order and collects what differs."""

    def __init__(self, entry: ShardEntry, index: pa.Table | None, vocab_size: int | None) -> None:
        self._entry = entry
        self._index = index
        self._vocab_size = vocab_size
        self._num_rows = self._num_tokens = self._num_loss_tokens = 0
        self._differences: dict[str, _Difference] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Check one batch that Arrow found valid."""
        nulls = [name for name in batch.schema.names if batch[name].null_count]
        ids, offsets = _flat(batch["input_ids"])
        mask, mask_offsets = _flat(batch["loss_mask"])
        lengths, mask_lengths = np.diff(offsets), np.diff(mask_offsets)
        if nulls or batch["input_ids"].values.null_count or batch["loss_mask"].values.null_count:
            self._note("nulls", batch, np.arange(min(1, batch.num_rows)), "no null", f"nulls in {nulls or 'lists'}")
        self._compare("length of loss_mask", batch, lengths, mask_lengths)
        sums = _sums(mask, mask_offsets)
        self._compare("num_loss_tokens", batch, sums, to_numpy(batch["num_loss_tokens"].fill_null(-1)))
        self._check_ids(batch, ids, offsets)
        if self._index is not None:
            self._check_index(batch, ids, offsets, sums)
        self._num_rows += batch.num_rows
        self._num_tokens += len(ids)
        self._num_loss_tokens += int(sums.sum())

    def problems(self, *, whole: bool) -> Iterator[Problem]:
        """What differs; the totals only of a shard that could be read as a `whole`."""
        for what, difference in self._differences.items():
            more = difference.num_rows - len(difference.rows)
            rows = ", ".join(difference.rows) + (f" and {more:,} more" if more else "")
            yield Problem(f"{self._entry.key} {what} in row {rows}", difference.expected, difference.found)
        if not whole:
            return
        entry = self._entry
        totals = {
            "rows": (entry.num_rows, self._num_rows),
            "tokens": (entry.num_tokens, self._num_tokens),
            "loss tokens": (entry.num_loss_tokens, self._num_loss_tokens),
        }
        if self._index is not None:
            totals["rows of the index"] = (entry.num_rows, self._index.num_rows)
        for name, (expected, found) in totals.items():
            if expected != found:
                yield Problem(f"{entry.key} {name}", f"{expected:,}", f"{found:,}")

    def _check_ids(self, batch: pa.RecordBatch, ids: npt.NDArray[np.int32], offsets: IntArray) -> None:
        highest = np.iinfo(np.int32).max if self._vocab_size is None else self._vocab_size - 1
        if not len(ids) or (ids.min() >= 0 and ids.max() <= highest):
            return
        places = np.flatnonzero((ids < 0) | (ids > highest))
        rows = np.unique(np.searchsorted(offsets, places, side="right") - 1)
        self._note("id", batch, rows, f"0 to {highest}", str(ids[places[0]]))

    def _check_index(
        self, batch: pa.RecordBatch, ids: npt.NDArray[np.int32], offsets: IntArray, sums: IntArray
    ) -> None:
        assert self._index is not None
        part = self._index.slice(self._num_rows, batch.num_rows)
        if part.num_rows != batch.num_rows:
            return  # the totals say so
        actual = {
            "sample_id": batch["sample_id"],
            "source": batch["source"],
            "content_hash": pa.array(content_hashes(ids, offsets), INDEX_SCHEMA.field("content_hash").type),
            "num_tokens": pa.array(np.diff(offsets), pa.int32()),
            "num_loss_tokens": pa.array(sums, pa.int32()),
        }
        for name, values in actual.items():
            said = part[name].combine_chunks()
            said = said.chunk(0) if isinstance(said, pa.ChunkedArray) else said
            if not said.equals(values):
                self._compare(f"{name} of the index", batch, _objects(values), _objects(said))

    def _compare(self, what: str, batch: pa.RecordBatch, expected: Any, found: Any) -> None:
        rows = np.flatnonzero(expected != found)
        if len(rows):
            self._note(what, batch, rows, _shown(expected[rows[0]]), _shown(found[rows[0]]))

    def _note(self, what: str, batch: pa.RecordBatch, rows: IntArray, expected: str, found: str) -> None:
        difference = self._differences.setdefault(what, _Difference(expected, found))
        difference.num_rows += len(rows)
        for row in rows[: MAX_ROWS_NAMED - len(difference.rows)].tolist():
            name = printable(batch["sample_id"][row].as_py() or "")[:_MAX_ID_CHARS]
            difference.rows.append(f"{self._num_rows + row} (id {name})")


def _flat(column: pa.ListArray) -> tuple[npt.NDArray[Any], IntArray]:
    """The values of a list column without a copy where Arrow allows, and offsets that start at 0."""
    offsets = to_numpy(column.offsets).astype(np.int64)
    values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    empty = False if pa.types.is_boolean(values.type) else 0
    filled = values.fill_null(empty) if values.null_count else values
    return to_numpy(filled), offsets - offsets[0]


def _sums(mask: npt.NDArray[np.bool_], offsets: IntArray) -> IntArray:
    """Set entries of each row."""
    filled = np.diff(offsets) > 0
    sums = np.zeros(len(filled), dtype=np.int64)
    if filled.any():
        sums[filled] = np.add.reduceat(mask.view(np.uint8), offsets[:-1][filled], dtype=np.int64)
    return sums


def _objects(values: pa.Array) -> npt.NDArray[np.object_]:
    column = np.empty(len(values), dtype=object)
    column[:] = values.to_pylist()
    return column


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else printable(str(value))[:_MAX_ID_CHARS]
