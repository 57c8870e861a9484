"""The columns of a whole batch that the quality gate looks at, read from the shards' indexes.

A batch has millions of rows, so what is held of each is small: about 30 bytes, whatever its strings are. Ids and
contents are held as 8-byte keys; where two keys are equal the indexes are read again and the values themselves decide,
as for the few ids that a report shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dflash.data.quality_rules import MAX_EXAMPLE_CHARS, MAX_EXAMPLES
from dflash.data.rows import RowFlag
from dflash.data.shards import INDEX_SCHEMA
from dflash.data.without_pandas import to_numpy
from dflash.errors import DatasetError

BoolArray = npt.NDArray[np.bool_]
KeyArray = npt.NDArray[np.int64]
CountArray = npt.NDArray[np.int32]
KeyColumn = Literal["sample_id", "content_hash"]
_UNKNOWN: Final = -1
_HASH_BYTES: Final = INDEX_SCHEMA.field("content_hash").type.byte_width


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The batch's columns, n rows in s shards.

    Attributes:
        indexes: the index of each shard, s tables; read again where the strings of some rows are needed.
        starts: int64 [s + 1], shard i has the rows starts[i] to starts[i + 1].
        id_keys: int64 [n], equal for equal sample ids (and, by chance, for others).
        content_keys: int64 [n], as much of content_hash.
        lengths: int32 [n], tokens.
        loss: int32 [n], loss tokens.
        output: int32 [n], output_tokens of the record, -1 where it doesn't say.
        flags: uint16 [n], bits of RowFlag.
    """

    indexes: Sequence[pa.Table]
    starts: npt.NDArray[np.int64]
    id_keys: KeyArray
    content_keys: KeyArray
    lengths: CountArray
    loss: CountArray
    output: CountArray
    flags: npt.NDArray[np.uint16]

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.lengths)

    @property
    def known(self) -> BoolArray:
        """Rows whose record has output_tokens."""
        rows: BoolArray = self.output != _UNKNOWN
        return rows

    @property
    def window_cut(self) -> BoolArray:
        """Rows that were cut at max_seq_len."""
        return self.has(RowFlag.WINDOW_CUT)

    @property
    def comparable(self) -> BoolArray:
        """Rows whose mask should equal output_tokens: the window may rightly hold less."""
        return self.known & ~self.window_cut

    @property
    def agrees(self) -> BoolArray:
        """Rows of which the server counted as many tokens as the mask holds of the last response, whole."""
        # The flag compares what the target sampled; the window may have left less of it.
        whole = ~self.window_cut | (self.loss == self.output)
        rows: BoolArray = self.known & ~self.has(RowFlag.OUTPUT_MISMATCH) & whole
        return rows

    @property
    def confirmed(self) -> BoolArray:
        """Rows whose mask something beside our own rendering agrees with.

        The server counted as many tokens as the mask or the untrimmed text has, or the record carried the sampled ids.
        """
        return self.agrees | self.has(RowFlag.VERBATIM_WHITESPACE) | self.has(RowFlag.SAMPLED_IDS)

    @property
    def ratio(self) -> npt.NDArray[np.float64]:
        """Loss tokens to output_tokens, float64 [n], meaningful where `known`; 1 where `agrees`.

        Elsewhere the loss tokens of earlier turns count too, where they are in the mask.
        """
        # A count of 0 would divide by zero; any loss token in such a row is a disagreement, which n / 1 shows.
        ratio = self.loss / np.maximum(self.output, 1)
        ratio[self.agrees] = 1.0
        # Trimming leaves less than the server counted: only earlier turns in the mask lift such a row above 1.
        verbatim = self.has(RowFlag.VERBATIM_WHITESPACE)
        ratio[verbatim] = np.minimum(ratio[verbatim], 1.0)
        return ratio

    def has(self, flag: RowFlag) -> BoolArray:
        """Rows with this flag."""
        rows: BoolArray = (self.flags & int(flag)) != 0
        return rows

    def examples(self, rows: BoolArray) -> tuple[str, ...]:
        """Ids of up to ten of the rows, spread over the batch."""
        numbers = np.flatnonzero(rows)
        if len(numbers) > MAX_EXAMPLES:
            numbers = numbers[np.linspace(0, len(numbers) - 1, MAX_EXAMPLES).astype(np.int64)]
        return tuple(value[:MAX_EXAMPLE_CHARS] for _, values in self._read("sample_id", numbers) for value in values)

    def repeated(self, column: KeyColumn) -> BoolArray:
        """Rows that have the id or the content of an earlier row."""
        keys = self.id_keys if column == "sample_id" else self.content_keys
        ordered = np.sort(keys)
        twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        del ordered
        found = np.zeros(self.num_rows, np.bool_)
        seen: set[Any] = set()
        for numbers, values in self._read(column, np.flatnonzero(_is_among(keys, twice))):
            for number, value in zip(numbers.tolist(), values, strict=True):
                found[number] = value in seen
                seen.add(value)
        return found

    def _read(self, column: KeyColumn, numbers: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], Any]]:
        """Read a column's values at row numbers [k], ascending; yields those of one shard after another."""
        bounds = np.searchsorted(numbers, self.starts)
        for shard in np.flatnonzero(np.diff(bounds)).tolist():
            part = numbers[bounds[shard] : bounds[shard + 1]]
            values = _filled(self.indexes[shard], column).take(pa.array(part - self.starts[shard]))
            yield part, values.to_pylist()


def read_columns(indexes: Sequence[pa.Table]) -> BatchColumns:
    """Take what is held of each row from all indexes, one table at a time.

    Raises:
        DatasetError: an index has another schema.
    """
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    starts = [0]
    for number, table in enumerate(indexes):
        if not table.schema.equals(INDEX_SCHEMA):
            raise DatasetError(
                f"index {number} of the batch has another schema.\n  expected: {', '.join(INDEX_SCHEMA.names)}\n"
                f"  found:    {', '.join(table.schema.names)}\nTokenize its shard again."
            )
        for name, values in _held(table).items():
            parts.setdefault(name, []).append(values)
        starts.append(starts[-1] + table.num_rows)
    if not parts:
        parts = {name: [values] for name, values in _held(INDEX_SCHEMA.empty_table()).items()}
    # One column after the other, so that no more than one is held twice.
    joined = {name: np.concatenate(parts.pop(name)) for name in tuple(parts)}
    return BatchColumns(indexes, np.array(starts), **joined)


def _held(table: pa.Table) -> dict[str, npt.NDArray[Any]]:
    """What is held of an index's rows, by the names of `BatchColumns`."""
    return {
        "id_keys": _id_keys(_filled(table, "sample_id")),
        "content_keys": _content_keys(_filled(table, "content_hash")),
        "lengths": to_numpy(table["num_tokens"]),
        "loss": to_numpy(table["num_loss_tokens"]),
        "output": to_numpy(pc.fill_null(table["output_tokens"], _UNKNOWN)),
        "flags": to_numpy(table["flags"]),
    }


def _filled(table: pa.Table, column: KeyColumn) -> pa.ChunkedArray:
    """A key column in which null is the empty value."""
    return pc.fill_null(table[column], "" if column == "sample_id" else bytes(_HASH_BYTES))


def _id_keys(column: pa.ChunkedArray) -> KeyArray:
    """Python's own hash: keyed by a secret of the process, so that no batch can be made of equal keys."""
    keys = [np.fromiter(map(hash, chunk.to_pylist()), np.int64, len(chunk)) for chunk in column.chunks]
    return np.concatenate(keys) if keys else np.empty(0, np.int64)


def _content_keys(column: pa.ChunkedArray) -> KeyArray:
    """The first half of each hash."""
    words = [np.frombuffer(chunk.buffers()[1] or b"", np.int64)[2 * chunk.offset :] for chunk in column.chunks]
    keys = [part[: 2 * len(chunk) : 2] for part, chunk in zip(words, column.chunks, strict=True)]
    return np.concatenate(keys) if keys else np.empty(0, np.int64)


def _is_among(keys: KeyArray, wanted: KeyArray) -> BoolArray:
    """Which of the keys [n] are among the wanted ones [m], ascending."""
    if not len(wanted):
        return np.zeros(len(keys), np.bool_)
    places = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
    rows: BoolArray = wanted[places] == keys
    return rows
