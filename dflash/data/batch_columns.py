"""The columns of a whole batch that the quality gate looks at, read from the shards' indexes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dflash.data.quality_rules import MAX_EXAMPLE_CHARS, MAX_EXAMPLES
from dflash.data.rows import RowFlag
from dflash.data.shards import INDEX_SCHEMA
from dflash.errors import DatasetError

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

_USED: Final = [name for name in INDEX_SCHEMA.names if name != "finish_reason"]


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The batch's columns, n rows.

    Attributes:
        known: bool [n], the record has output_tokens.
        ratio: float64 [n], loss tokens to output_tokens, meaningful where `known`; 1 where `agrees`. Elsewhere the
            loss tokens of earlier turns count too, where they are in the mask.
        agrees: bool [n], the server counted as many tokens as the mask holds of the last response, whole.
        confirmed: bool [n], something beside our own rendering agrees with the mask: `agrees`, or the server counted
            as many tokens as the untrimmed text has, or the record carried the sampled ids.
    """

    ids: pa.ChunkedArray
    hashes: pa.ChunkedArray
    sources: pa.ChunkedArray
    scripts: pa.ChunkedArray
    lengths: IntArray
    loss: IntArray
    known: BoolArray
    flags: npt.NDArray[np.uint16]
    ratio: npt.NDArray[np.float64]
    agrees: BoolArray
    confirmed: BoolArray

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.lengths)

    @property
    def window_cut(self) -> BoolArray:
        """Rows that were cut at max_seq_len."""
        return self.has(RowFlag.WINDOW_CUT)

    @property
    def comparable(self) -> BoolArray:
        """Rows whose mask should equal output_tokens: the window may rightly hold less."""
        return self.known & ~self.window_cut

    def has(self, flag: RowFlag) -> BoolArray:
        """Rows with this flag."""
        return _flagged(self.flags, flag)

    def examples(self, rows: BoolArray) -> tuple[str, ...]:
        """Ids of up to ten of the rows, spread over the batch."""
        numbers = np.flatnonzero(rows)
        if len(numbers) > MAX_EXAMPLES:
            numbers = numbers[np.linspace(0, len(numbers) - 1, MAX_EXAMPLES).astype(np.int64)]
        return tuple(value[:MAX_EXAMPLE_CHARS] for value in self.ids.take(pa.array(numbers)).to_pylist())


def read_columns(indexes: Iterable[pa.Table]) -> BatchColumns:
    """Put the used columns of all indexes behind one another.

    Raises:
        DatasetError: an index has another schema.
    """
    parts: list[pa.Table] = []
    for number, table in enumerate(indexes):
        if not table.schema.equals(INDEX_SCHEMA):
            raise DatasetError(
                f"index {number} of the batch has another schema.\n  expected: {', '.join(INDEX_SCHEMA.names)}\n"
                f"  found:    {', '.join(table.schema.names)}\nTokenize its shard again."
            )
        parts.append(table.select(_USED))
    table = pa.concat_tables(parts) if parts else INDEX_SCHEMA.empty_table().select(_USED)
    known = pc.is_valid(table["output_tokens"]).to_numpy()
    output = pc.fill_null(table["output_tokens"], 0).to_numpy().astype(np.int64)
    loss = table["num_loss_tokens"].to_numpy().astype(np.int64)
    flags = table["flags"].to_numpy()
    agrees = known & ~_flagged(flags, RowFlag.OUTPUT_MISMATCH)
    # The flag compares what the target sampled; the window may have left less of it.
    agrees &= ~_flagged(flags, RowFlag.WINDOW_CUT) | (loss == output)
    verbatim = _flagged(flags, RowFlag.VERBATIM_WHITESPACE)
    # A count of 0 would divide by zero; any loss token in such a row is a disagreement, which n / 1 shows.
    ratio = np.where(agrees, 1.0, loss / np.maximum(output, 1))
    # Trimming leaves less than the server counted: only earlier turns in the mask lift such a row above 1.
    ratio = np.where(verbatim, np.minimum(ratio, 1.0), ratio)
    return BatchColumns(
        ids=pc.fill_null(table["sample_id"], ""),
        hashes=table["content_hash"],
        sources=pc.fill_null(table["source"], ""),
        scripts=pc.fill_null(table["script"], ""),
        lengths=table["num_tokens"].to_numpy().astype(np.int64),
        loss=loss,
        known=known,
        flags=flags,
        ratio=ratio,
        agrees=agrees,
        confirmed=agrees | verbatim | _flagged(flags, RowFlag.SAMPLED_IDS),
    )


def _flagged(flags: npt.NDArray[np.uint16], flag: RowFlag) -> BoolArray:
    rows: BoolArray = (flags & int(flag)) != 0
    return rows
