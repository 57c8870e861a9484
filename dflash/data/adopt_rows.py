"""Rows of a saved dataset that another program wrote: which columns can be used, and every row checked and cast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dflash.data.rows import TokenizedRows
from dflash.data.shards import SHARD_SCHEMA, ShardWriter, WrittenShard, read_batches
from dflash.data.without_pandas import to_numpy
from dflash.errors import DatasetError, IncompatibleError

IntArray = npt.NDArray[np.int64]
REQUIRED: Final = ("input_ids", "loss_mask")


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Ids are below `vocab_size`; rows have at most `max_seq_len` tokens."""

    vocab_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """How a file's columns are used.

    Attributes:
        schema: what the file says; all files of a dataset say the same.
        identical: it is `SHARD_SCHEMA`, so the file itself can be kept.
        ignored: columns that are not taken over.
    """

    schema: pa.Schema
    identical: bool
    ignored: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Whether the file has a column."""
        return name in self.schema.names


def plan_columns(schema: pa.Schema, where: str) -> ColumnPlan:
    """Decide whether a file with this schema can be adopted, and how.

    Raises:
        IncompatibleError: a column is missing or has a type that can't be cast; with a table of what was found.
    """
    rows = []
    for field in SHARD_SCHEMA:
        found = schema.field(field.name).type if schema.names.count(field.name) == 1 else None
        if found is None:
            usable = field.name not in REQUIRED and field.name not in schema.names
        else:
            usable = _is_usable(field.name, found)
        rows.append((field.name, _wanted(field.name), "missing" if found is None else str(found), usable))
    if not all(usable for *_, usable in rows):
        lines = [f"  {name:16} {wanted:34} {found}{'' if ok else '   <- refused'}" for name, wanted, found, ok in rows]
        raise IncompatibleError(
            f"{where} can't be adopted: its columns don't fit.\n  {'column':16} {'expected':34} found\n"
            + "\n".join(lines)
            + "\nCast or rename the columns and save it again, or tokenize the completions anew."
        )
    ignored = tuple(name for name in schema.names if name not in SHARD_SCHEMA.names)
    return ColumnPlan(schema, schema.equals(SHARD_SCHEMA), ignored)


def read_schema(path: Path) -> pa.Schema:
    """Schema of an Arrow stream file.

    Raises:
        DatasetError: it isn't one.
    """
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            return reader.schema
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{path} can't be read as an Arrow IPC stream: {error}. Expected a file that save_to_disk wrote; copy the "
            "dataset again."
        ) from error


def write_rows(path: Path, key: str, columns: ColumnPlan, limits: RowLimits, writer: ShardWriter) -> WrittenShard:
    """Check and cast every row of a file and write it to a shard and its index.

    Args:
        path: the file.
        key: its name in messages, and in the ids of rows that have none.
        columns: what its schema must be.
        limits: what its rows must keep to.
        writer: takes the rows; is closed.

    Raises:
        DatasetError: the file is damaged or has other columns than the first; or a row can't be used: names file, row
            and why.
    """
    start = 0
    for batch in read_batches(path, columns.schema):
        writer.write(_rows(batch, f"{key}:", start, limits))
        start += batch.num_rows
    return writer.close()


def _rows(batch: pa.RecordBatch, prefix: str, start: int, limits: RowLimits) -> TokenizedRows:
    place = _Place(prefix, start)
    ids, offsets = _ids(batch["input_ids"], place, limits)
    mask, mask_offsets = _mask(batch["loss_mask"], place)
    lengths = np.diff(offsets)
    place.refuse(lengths != np.diff(mask_offsets), "loss_mask is not as long as input_ids")
    place.refuse(lengths == 0, "the row is empty")
    place.refuse(lengths > limits.max_seq_len, f"more than max_seq_len={limits.max_seq_len} tokens")
    sums = np.add.reduceat(mask, offsets[:-1], dtype=np.int64) if len(lengths) else np.zeros(0, np.int64)
    names = batch.schema.names
    if "num_loss_tokens" in names:
        place.refuse(_integers(batch["num_loss_tokens"], place) != sums, "num_loss_tokens is not the sum of loss_mask")
    count = batch.num_rows
    if "sample_id" in names:
        sample_ids = _strings(batch["sample_id"], place)
    else:
        sample_ids = [f"{prefix}{row}" for row in range(start, start + count)]
    return TokenizedRows(
        ids=ids,
        offsets=offsets,
        mask=mask,
        sample_ids=sample_ids,
        sources=_strings(batch["source"], place) if "source" in names else [""] * count,
        num_loss_tokens=sums.astype(np.int32),
        output_tokens=np.full(count, -1, np.int32),
        finish_reasons=[""] * count,
        flags=np.zeros(count, np.uint16),
        scripts=[""] * count,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record batch starts, for messages."""

    prefix: str
    start: int

    def refuse(self, rows: npt.NDArray[np.bool_], why: str) -> None:
        """Raise if any row is marked; names the first."""
        if rows.any():
            first = self.start + int(np.flatnonzero(rows)[0])
            raise DatasetError(
                f"{self.prefix}{first}: {why} ({int(rows.sum())} rows of this record batch). Expected rows as the "
                "tokenizer made them: name the right tokenizer and options, or repair the dataset and adopt it again."
            )

    def refuse_nulls(self, column: pa.Array) -> None:
        self.refuse(to_numpy(column.is_null()), "a value is missing (null)")


def _ids(column: pa.Array, place: _Place, limits: RowLimits) -> tuple[npt.NDArray[np.int32], IntArray]:
    values, offsets = _flat(column, place)
    outside = (values < 0) | (values >= limits.vocab_size)
    if outside.any():
        row = int(np.searchsorted(offsets, np.flatnonzero(outside)[0], side="right")) - 1
        found = values[outside][0]
        rows = np.arange(len(column)) == row
        place.refuse(rows, f"id {found} is not in the tokenizer's vocabulary of {limits.vocab_size}")
    return values.astype(np.int32), offsets


def _mask(column: pa.Array, place: _Place) -> tuple[npt.NDArray[np.bool_], IntArray]:
    values, offsets = _flat(column, place)
    if values.dtype != np.bool_:
        outside = (values != 0) & (values != 1)
        if outside.any():
            row = int(np.searchsorted(offsets, np.flatnonzero(outside)[0], side="right")) - 1
            place.refuse(np.arange(len(column)) == row, f"loss_mask holds {values[outside][0]}, only 0 and 1 are known")
    return values.astype(np.bool_), offsets


def _flat(column: pa.Array, place: _Place) -> tuple[npt.NDArray[Any], IntArray]:
    """Values of a list column and where each row starts in them."""
    place.refuse_nulls(column)
    values = column.flatten()
    lengths = to_numpy(pc.list_value_length(column)).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if values.null_count:
        first = int(np.flatnonzero(to_numpy(values.is_null()))[0])
        row = int(np.searchsorted(offsets, first, side="right")) - 1
        place.refuse(np.arange(len(column)) == row, "a list holds a missing value (null)")
    return to_numpy(values), offsets


def _integers(column: pa.Array, place: _Place) -> IntArray:
    place.refuse_nulls(column)
    values: IntArray = to_numpy(column).astype(np.int64)
    return values


def _strings(column: pa.Array, place: _Place) -> list[str]:
    place.refuse_nulls(column)
    values: list[str] = column.to_pylist()
    return values


def _is_usable(name: str, kind: pa.DataType) -> bool:
    if name in REQUIRED:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            return False
        is_bool = name == "loss_mask" and pa.types.is_boolean(kind.value_type)
        return is_bool or bool(pa.types.is_integer(kind.value_type))
    if name == "num_loss_tokens":
        return bool(pa.types.is_integer(kind))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _wanted(name: str) -> str:
    return {
        "input_ids": "list of integers",
        "loss_mask": "list of bool or integers 0 and 1",
        "sample_id": "string, or missing (file:row)",
        "source": "string, or missing",
        "num_loss_tokens": "integer, or missing",
    }[name]
