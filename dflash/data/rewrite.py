"""Write a shard anew without some of its rows; the other columns of its index go along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dflash.data.rows import TokenizedRows
from dflash.data.shards import ShardWriter, WrittenShard, read_batches, read_index
from dflash.data.without_pandas import to_numpy
from dflash.errors import DamagedDatasetError
from dflash.manifest import ShardEntry, fingerprint_of, sha256_hex

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RewrittenShard:
    """A shard that lies on this machine and isn't on the store yet."""

    entry: ShardEntry
    shard_path: Path
    index_path: Path


def drop_rows(entry: ShardEntry, keep: BoolArray, shard: Path, index: Path, folder: Path) -> RewrittenShard:
    """Write the kept rows, in order, to a new shard and index in `folder`.

    Args:
        entry: the shard as its manifest or receipt describes it.
        keep: bool [rows of the shard], at least one true.
        shard: the shard's file.
        index: its index.
        folder: where the new files appear; it exists.

    Raises:
        DamagedDatasetError: shard, index and entry disagree on the number of rows.
        DatasetError: a file is not what it should be.
    """
    table = read_index(index)
    name = fingerprint_of({"shard": entry.sha256, "kept": sha256_hex(np.packbits(keep).tobytes()), "rows": len(keep)})
    shard_path, index_path = folder / f"{name}.arrow", folder / f"{name}.index.arrow"
    with ShardWriter(shard_path, index_path) as writer:
        start = 0
        for batch in read_batches(shard):
            end = start + batch.num_rows
            if end > min(len(keep), table.num_rows):
                break
            kept = pa.array(keep[start:end])
            writer.write(rows_of(batch.filter(kept), table.slice(start, batch.num_rows).filter(kept)))
            start = end
        if not start == len(keep) == table.num_rows == entry.num_rows:
            raise DamagedDatasetError(
                f"{shard} and its index {index} disagree with their manifest: {entry.num_rows} rows expected, "
                f"the index has {table.num_rows}. Run `dflash verify` and restore the version from a backup."
            )
        written = writer.close()
    return RewrittenShard(_entry(entry, written, name), shard_path, index_path)


def _entry(old: ShardEntry, written: WrittenShard, fingerprint: str) -> ShardEntry:
    return old.model_copy(
        update={
            "sha256": written.shard.sha256,
            "index_sha256": written.index.sha256,
            "num_bytes": written.shard.num_bytes,
            "num_rows": written.num_rows,
            "num_tokens": written.num_tokens,
            "num_loss_tokens": written.num_loss_tokens,
            "index_bytes": written.index.num_bytes,
            "fingerprint": fingerprint,
        }
    )


def rows_of(shard: pa.RecordBatch, index: pa.Table) -> TokenizedRows:
    """Rows of a shard (`SHARD_SCHEMA`) with what its index (`INDEX_SCHEMA`) says about them, as flat buffers."""
    ids, offsets = flat_ids(shard)
    output = pc.fill_null(index["output_tokens"], -1)
    return TokenizedRows(
        ids=ids,
        offsets=offsets,
        mask=to_numpy(shard["loss_mask"].flatten()).astype(np.bool_),
        sample_ids=shard["sample_id"].to_pylist(),
        sources=shard["source"].to_pylist(),
        num_loss_tokens=to_numpy(shard["num_loss_tokens"]),
        output_tokens=to_numpy(output),
        finish_reasons=index["finish_reason"].to_pylist(),
        flags=to_numpy(index["flags"]),
        scripts=index["script"].to_pylist(),
    )


def flat_ids(shard: pa.RecordBatch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The ids of all rows joined, and where each row starts in them."""
    lengths = to_numpy(pc.list_value_length(shard["input_ids"])).astype(np.int64)
    return to_numpy(shard["input_ids"].flatten()), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
