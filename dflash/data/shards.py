"""Arrow shards of a dataset and the index that lies beside each.

A shard is an Arrow IPC *stream* file (`datasets` opens no other kind) with record batches of a fixed row count, so
the same rows give the same bytes however they were batched on the way in. Its index holds one small row a sample:
what the quality gate, merging and verifying need without touching the tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.data.rows import TokenizedRows, join_rows
from dflash.errors import DatasetError
from dflash.manifest import ShardEntry
from dflash.storage.files import CHUNK_BYTES

try:
    from dflash.data import _row_hashes
except ImportError:  # no compiler when the package was installed
    _row_hashes = None  # type: ignore[assignment]

SCHEMA_VERSION = 1
ROWS_PER_BATCH = 1000
_ID_BYTES, _HASH_BYTES = 4, 16
_END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of an Arrow IPC stream

# Declared once. `datasets` reads it as List(int32), List(bool), string, string, int32.
SHARD_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("sample_id", pa.string()),
        pa.field("source", pa.string()),
        pa.field("num_loss_tokens", pa.int32()),
    ]
)

# One row a sample, in shard order. content_hash is BLAKE2b-128 over the little-endian int32 ids.
INDEX_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string()),
        pa.field("source", pa.string()),
        pa.field("content_hash", pa.binary(_HASH_BYTES)),
        pa.field("num_tokens", pa.int32()),
        pa.field("num_loss_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32()),  # null where the record doesn't say
        pa.field("finish_reason", pa.string()),  # empty where the record doesn't say
        pa.field("flags", pa.uint16()),  # bits of RowFlag
        pa.field("script", pa.string()),  # dominant script of the response: latin, han, ...
    ]
)


@dataclass(frozen=True, slots=True)
class StreamFile:
    """A finished Arrow stream file: where it is, its SHA-256 (hex) and size."""

    path: Path
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """What `ShardWriter.close` leaves: the shard, its index, and their counts."""

    shard: StreamFile
    index: StreamFile
    num_rows: int
    num_tokens: int
    num_loss_tokens: int

    def entry(self, fingerprint: str, encoder: str) -> ShardEntry:
        """The manifest's entry for this shard, made from what `fingerprint` stands for."""
        return ShardEntry(
            sha256=self.shard.sha256,
            num_bytes=self.shard.num_bytes,
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            num_loss_tokens=self.num_loss_tokens,
            index_sha256=self.index.sha256,
            index_bytes=self.index.num_bytes,
            fingerprint=fingerprint,
            encoder=encoder,
        )


class _StreamSink:
    """Arrow stream into `path.part`, hashed while it is written, renamed when whole."""

    def __init__(self, path: Path, schema: pa.Schema, options: pa.ipc.IpcWriteOptions | None = None) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._file: IO[bytes] = self._part.open("wb")
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        self.closed = False
        self._writer = pa.ipc.new_stream(pa.PythonFile(self, mode="w"), schema, options=options)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._digest.update(piece)
            self._file.write(piece)
        self._num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Asked for by pyarrow's wrapper; the file itself is closed by `finish` or `abort`."""

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def finish(self) -> StreamFile:
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._path)
        return StreamFile(self._path, self._digest.hexdigest(), self._num_bytes)

    def abort(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


class ShardWriter:
    """Writes rows to a shard and its index; a context manager that removes both files on an error.

    The bytes depend on the rows and their order alone, not on how they were grouped in `write` calls.
    """

    def __init__(self, shard_path: Path, index_path: Path, rows_per_batch: int = ROWS_PER_BATCH) -> None:
        self._rows_per_batch = rows_per_batch
        self._shard = _StreamSink(shard_path, SHARD_SCHEMA)
        self._index = _StreamSink(index_path, INDEX_SCHEMA, pa.ipc.IpcWriteOptions(compression="zstd"))
        self._pending: list[TokenizedRows] = []
        self._num_pending = 0
        self._num_rows = self._num_tokens = self._num_loss_tokens = 0
        self._written: WrittenShard | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written is None:
            self._shard.abort()
            self._index.abort()

    def write(self, rows: TokenizedRows) -> None:
        """Add rows behind those already written."""
        if rows.num_rows == 0:
            return
        self._pending.append(rows)
        self._num_pending += rows.num_rows
        if self._num_pending >= self._rows_per_batch:
            self._drain(final=False)

    def close(self) -> WrittenShard:
        """Write what is left and move both files to their names; a shard may be without rows."""
        if self._num_pending:
            self._drain(final=True)
        self._written = WrittenShard(
            self._shard.finish(), self._index.finish(), self._num_rows, self._num_tokens, self._num_loss_tokens
        )
        return self._written

    def _drain(self, *, final: bool) -> None:
        """Write all full batches of the pending rows (and the rest if final), keep the remainder."""
        joined = join_rows(self._pending)
        start, step = 0, self._rows_per_batch
        while joined.num_rows - start >= step or (final and start < joined.num_rows):
            end = min(start + step, joined.num_rows)
            self._write_batches(joined.part(start, end))
            start = end
        rest = joined.part(start, joined.num_rows)
        self._pending = [rest] if rest.num_rows else []
        self._num_pending = rest.num_rows

    def _write_batches(self, rows: TokenizedRows) -> None:
        self._shard.write_batch(_shard_batch(rows))
        self._index.write_batch(_index_batch(rows))
        self._num_rows += rows.num_rows
        self._num_tokens += len(rows.ids)
        self._num_loss_tokens += int(rows.num_loss_tokens.sum())


def _shard_batch(rows: TokenizedRows) -> pa.RecordBatch:
    offsets = pa.array(rows.offsets.astype(np.int32))
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(rows.ids)),
        pa.ListArray.from_arrays(offsets, _bits(rows.mask)),
        pa.array(rows.sample_ids, pa.string()),
        pa.array(rows.sources, pa.string()),
        pa.array(rows.num_loss_tokens, pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SHARD_SCHEMA)


def _bits(values: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """`pa.array(values)`, ten times as fast."""
    packed = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.BooleanArray.from_buffers(pa.bool_(), len(values), [None, packed])


def _index_batch(rows: TokenizedRows) -> pa.RecordBatch:
    columns = [
        pa.array(rows.sample_ids, pa.string()),
        pa.array(rows.sources, pa.string()),
        pa.array(content_hashes(rows.ids, rows.offsets), pa.binary(_HASH_BYTES)),
        pa.array(np.diff(rows.offsets).astype(np.int32)),
        pa.array(rows.num_loss_tokens, pa.int32()),
        pa.array(rows.output_tokens, pa.int32(), mask=rows.output_tokens < 0),
        pa.array(rows.finish_reasons, pa.string()),
        pa.array(rows.flags, pa.uint16()),
        pa.array(rows.scripts, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA)


def content_hashes(ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> list[bytes]:
    """BLAKE2b-128 of each row's ids as little-endian int32, without a copy: equal rows give equal hashes.

    Native code hashes four rows at a time, where a compiler was there to build it; the hashes are the same.

    Args:
        ids: int32 [t], the rows' ids joined.
        offsets: int64 [n + 1], row i is ids[offsets[i]:offsets[i + 1]].
    """
    data = np.ascontiguousarray(ids, dtype="<i4").data.cast("B")
    bounds = np.ascontiguousarray(offsets, np.int64) * _ID_BYTES
    if _row_hashes is not None:
        digests = _row_hashes.blake2b_rows(data, bounds.data)
        return [digests[start : start + _HASH_BYTES] for start in range(0, len(digests), _HASH_BYTES)]
    return [
        hashlib.blake2b(data[start:end], digest_size=_HASH_BYTES).digest()
        for start, end in itertools.pairwise(bounds.tolist())
    ]


def read_batches(path: Path, schema: pa.Schema = SHARD_SCHEMA) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream file, memory-mapped, one at a time.

    Raises:
        DatasetError: not an Arrow stream, cut short, or of another schema.
    """
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            if not reader.schema.equals(schema):
                raise DatasetError(
                    f"{path} has another schema.\n  expected: {_one_line(schema)}\n"
                    f"  found:    {_one_line(reader.schema)}"
                )
            for batch in reader:
                batch.validate(full=True)  # before anything follows its offsets
                yield batch
        _require_end_mark(path)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are no UTF-8
        raise DatasetError(
            f"{path} can't be read as an Arrow IPC stream: {error}. Expected a whole stream file; "
            "verify the dataset and restore the shard from a backup or tokenize it again."
        ) from error


def _require_end_mark(path: Path) -> None:
    """A stream that was cut between two batches reads as a shorter one without an error; only the mark tells."""
    with path.open("rb") as stream:
        stream.seek(-len(_END_MARK), os.SEEK_END)
        if stream.read() != _END_MARK:
            raise DatasetError(f"{path} has no end mark: it was cut between two record batches. Verify the dataset.")


def read_index(path: Path) -> pa.Table:
    """Read a shard's whole index (about 30 bytes a row).

    Raises:
        DatasetError: not an index, cut short, or of another schema.
    """
    return pa.Table.from_batches(list(read_batches(path, INDEX_SCHEMA)), INDEX_SCHEMA)


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
