"""Rows of a shard by number, without reading the shard into memory.

Arrow IPC streams have no row index, but mapped into memory their buffers are used in place: a row is a slice of
one flat buffer, and only the pages that are touched are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.data.without_pandas import to_numpy
from dflash.errors import DamagedDatasetError

COLUMNS = ("input_ids", "loss_mask", "sample_id", "source")


@dataclass(frozen=True, slots=True)
class Row:
    """One training row.

    Attributes:
        key: shard and row in it; the same in every epoch.
        input_ids: int32 [S].
        loss_mask: bool [S], true on the tokens that the target wrote.
        sample_id: the completion's id.
        source: where the completion came from.
    """

    key: tuple[int, int]
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    sample_id: str
    source: str


class ShardReader:
    """Random access to the rows of one memory-mapped shard.

    Attributes:
        shard: its number in the dataset.
        num_rows: what the manifest says, checked against the file.
        lengths: int64 [num_rows], tokens of each row.

    Raises:
        DamagedDatasetError: the file isn't the shard that the manifest describes.
    """

    def __init__(self, path: Path | None, shard: int, num_rows: int) -> None:
        self.shard = shard
        self.num_rows = num_rows
        self.lengths = np.empty(0, dtype=np.int64)
        if path is None:
            return
        table = read_shard(path)
        if table.num_rows != num_rows:
            raise DamagedDatasetError(
                f"Shard {shard} ({path}) has {table.num_rows} rows, but its manifest says {num_rows}. "
                "Run `dflash verify`, then restore the version from its backup."
            )
        self._table = table
        self._ids, self._mask = _values(table, "input_ids"), _values(table, "loss_mask")
        self._offsets = row_offsets(table, "input_ids")
        if not np.array_equal(self._offsets, row_offsets(table, "loss_mask")):
            raise DamagedDatasetError(
                f"Shard {shard} ({path}) has rows whose loss_mask is not as long as their input_ids. "
                "Run `dflash verify`."
            )
        self.lengths = np.diff(self._offsets)

    def row(self, row: int, limit: int) -> Row:
        """Copy one row out of the map, at most `limit` tokens of it."""
        start, stop = self._offsets[row], min(self._offsets[row + 1], self._offsets[row] + limit)
        ids = self._ids[start:stop].astype(np.int32)
        mask = self._mask[start:stop].astype(np.bool_)
        names = [self._table.column(name)[row].as_py() for name in ("sample_id", "source")]
        return Row((self.shard, row), ids, mask, names[0] or "", names[1] or "")


def read_shard(path: Path) -> pa.Table:
    """Map a shard; its columns are combined, so that a row is a slice of one flat buffer."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedDatasetError(
            f"Shard {path} is not a readable Arrow IPC stream: {error}. Run `dflash verify`."
        ) from error
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise DamagedDatasetError(
            f"Shard {path} has no columns {missing}; found {table.column_names}. Run `dflash verify`."
        )
    return table.select(COLUMNS).combine_chunks()


def _list_column(table: pa.Table, name: str) -> pa.ListArray:
    column = table.column(name)
    if not pa.types.is_list(column.type) or column.null_count:
        raise DamagedDatasetError(f"Column {name} of a shard must be a list without nulls; found {column.type}.")
    return column.chunk(0) if column.num_chunks else pa.array([], type=column.type)


def row_offsets(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    """Where each row of a list column starts in its flat values, and where the last one ends."""
    offsets: npt.NDArray[np.int64] = to_numpy(_list_column(table, name).offsets).astype(np.int64)
    start = offsets[0] if len(offsets) else 0
    return np.asarray(offsets - start, dtype=np.int64)


def _values(table: pa.Table, name: str) -> npt.NDArray[Any]:
    return to_numpy(_list_column(table, name).flatten())
