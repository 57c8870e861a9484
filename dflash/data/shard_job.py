"""From one group of local completion files to a shard, its index, its rejects and its receipt in the spool."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.data.completions import Completion, Reject
from dflash.data.encoders import HuggingFaceEncoder
from dflash.data.plain_rows import PlainRows
from dflash.data.shards import ShardWriter, WrittenShard
from dflash.data.spool import (
    ABANDONED_S,
    INDEX_FILE,
    RECEIPT_FILE,
    REJECTS_FILE,
    SHARD_FILE,
    LocalInput,
    ShardJob,
    read_spooled,
    remove_spooled,
)
from dflash.data.tokenize import tokenize_batch
from dflash.errors import DatasetError, IntegrityError, StorageError
from dflash.manifest import InputFile, ShardReceipt, sha256_hex
from dflash.storage.files import file_sha256

if TYPE_CHECKING:
    from dflash.data._plain_rows import PlainRow
    from dflash.data.tokenizer import TargetTokenizer

# A batch ends at either: enough for one batched encode call to pay, little enough to bound memory.
RECORDS_PER_BATCH = 512
RECORDS_PER_FIRST_BATCH = 32  # the shapes that it shows are planned natively from then on
BYTES_PER_BATCH = 32 << 20


@dataclass(slots=True)
class _Tally:
    """Counts and rejects of the files of one shard."""

    records: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    lines: list[bytes] = field(default_factory=list)

    def add(self, reject: Reject) -> None:
        self.rejected[reject.file] += 1
        self.reasons[str(reject.reason)] += 1
        entry = {
            "file": reject.file,
            "line": reject.line,
            "byte_offset": reject.byte_offset,
            "id": reject.id,
            "reason": str(reject.reason),
            "message": reject.message,
        }
        self.lines.append(json.dumps(entry, ensure_ascii=True).encode() + b"\n")


def run_shard_job(job: ShardJob, tokenizer: TargetTokenizer) -> ShardReceipt:
    """Make the shard, unless the spool holds it whole already.

    Raises:
        DatasetError: there are records, and every one was rejected; names the reasons. Files without a record give a
            shard without rows.
    """
    finished = read_spooled(job.result)
    if finished is not None:
        return finished
    try:
        return _make_shard(job, tokenizer)
    except OSError as error:
        raise StorageError(
            f"{job.spool}: {error}. Expected a folder with room for a shard; make room, run again."
        ) from error


def _make_shard(job: ShardJob, tokenizer: TargetTokenizer) -> ShardReceipt:
    job.spool.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(job.spool)
    scratch = Path(tempfile.mkdtemp(prefix=f".{job.fingerprint[:12]}-", dir=job.spool))
    try:
        receipt = _write_shard(job, tokenizer, scratch)
        (scratch / RECEIPT_FILE).write_bytes(receipt.to_bytes())
        _move_into_place(scratch, job.result)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return receipt


def _remove_abandoned(spool: Path) -> None:
    """Remove scratch folders that killed processes left; a living one is never a day old."""
    for folder in spool.glob(".*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _move_into_place(scratch: Path, result: Path) -> None:
    """Give the finished folder its name; where another run was first, its equal folder stays."""
    for _ in range(2):
        try:
            scratch.replace(result)
        except OSError:  # not empty: another run's, or a damaged one
            if read_spooled(result) is not None:
                return
            remove_spooled(result)
        else:
            return
    raise DatasetError(f"{result} can't be replaced: another process keeps writing there. Run again.")


def _write_shard(job: ShardJob, tokenizer: TargetTokenizer, scratch: Path) -> ShardReceipt:
    tally = _Tally()
    with ShardWriter(scratch / SHARD_FILE, scratch / INDEX_FILE) as writer:
        encoder = "none"
        reference = HuggingFaceEncoder(tokenizer.backend) if job.encoder == "huggingface" else None
        reader = PlainRows(tokenizer, job.options)
        for entries in _batches(_read_all(job.inputs, reader, tally)):
            batch = tokenize_batch(entries, tokenizer, job.options, reference)
            encoder = batch.encoder
            for reject in batch.rejects:
                tally.add(reject)
            writer.write(batch.rows)
        written = writer.close()
    if written.num_rows == 0 and tally.records:
        raise DatasetError(_all_rejected(job, tally))
    return _receipt(job, tally, written, encoder, scratch)


def _receipt(job: ShardJob, tally: _Tally, written: WrittenShard, encoder: str, scratch: Path) -> ShardReceipt:
    rejects = b"".join(tally.lines)
    (scratch / REJECTS_FILE).write_bytes(rejects)
    entry = written.entry(job.fingerprint, encoder)
    inputs = tuple(
        InputFile(
            key=item.key,
            size=item.size,
            etag=item.etag,
            sha256=item.sha256,
            num_records=tally.records[item.key],
            num_rejected=tally.rejected[item.key],
        )
        for item in job.inputs
    )
    return ShardReceipt(
        shard=entry,
        inputs=inputs,
        reject_reasons=dict(sorted(tally.reasons.items())),
        rejects_sha256=sha256_hex(rejects) if rejects else None,
    )


def _read_all(inputs: Iterable[LocalInput], reader: PlainRows, tally: _Tally) -> Iterator[Completion | PlainRow]:
    for item in inputs:
        if item.path.stat().st_size != item.size:
            raise IntegrityError(
                f"{item.path} ({item.key}) changed between download and reading: expected {item.size} bytes, "
                f"found {item.path.stat().st_size}. Run again."
            )
        for entry in reader.read(item.path, file=item.key):
            tally.records[item.key] += 1
            if isinstance(entry, Reject):
                tally.add(entry)
            else:
                yield entry
        if not item.is_own:
            _require_unchanged(item)


def _require_unchanged(item: LocalInput) -> None:
    """A file of the user's own folder may be edited while it is read, to the same size too."""
    found = file_sha256(item.path)
    if found != item.sha256:
        raise IntegrityError(
            f"{item.path} ({item.key}) was changed after it was listed:\n  expected: sha256 {item.sha256}\n"
            f"  found:    sha256 {found}\nRun again when nobody writes there."
        )


def _batches(entries: Iterable[Completion | PlainRow]) -> Iterator[list[Completion | PlainRow]]:
    """Cut the stream into batches bounded in records and in bytes; a batch never spans two files."""
    max_records = RECORDS_PER_FIRST_BATCH
    batch: list[Completion | PlainRow] = []
    for entry in entries:
        other_file = batch and batch[-1].file != entry.file
        too_large = batch and entry.byte_offset - batch[0].byte_offset > BYTES_PER_BATCH
        if len(batch) == max_records or other_file or too_large:
            yield batch
            batch = []
            max_records = RECORDS_PER_BATCH
        batch.append(entry)
    if batch:
        yield batch


def _all_rejected(job: ShardJob, tally: _Tally) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in tally.reasons.most_common()) or "nothing"
    first = f" First: {tally.lines[0].decode()}" if tally.lines else ""
    return (
        f"No usable record in the {len(job.inputs)} files from {job.inputs[0].key} to {job.inputs[-1].key}: "
        f"{sum(tally.records.values())} records read, rejected for: {reasons}.{first}"
    )
