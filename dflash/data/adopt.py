"""A folder that `datasets.save_to_disk` wrote becomes version 1, without tokenizing anything again.

Files whose schema is ours are kept byte for byte, under the name of their content; others are cast and written anew,
a record batch at a time. Either way every row is checked and gets its entry in an index. The folder may be the dataset
root itself: then its `state.json` is replaced on the condition that nobody changed it, and its old files stay until
garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash.config import GateThresholds, TokenizeOptions
from dflash.data.adopt_rows import ColumnPlan, RowLimits, plan_columns, read_schema, write_rows
from dflash.data.dataset import INFO_KEY, POINTER_KEY, DatasetRoot, Pointer
from dflash.data.plan import CODE_VERSION
from dflash.data.quality import assess
from dflash.data.quality_report import Baseline
from dflash.data.saved_folder import list_data_files, read_state
from dflash.data.saved_format import NO_FEATURES, dataset_info
from dflash.data.shards import SCHEMA_VERSION, ShardWriter, WrittenShard, read_index
from dflash.errors import DatasetError, ObjectNotFoundError
from dflash.manifest import (
    Batch,
    Counts,
    InputFile,
    Manifest,
    PointerRecord,
    ShardEntry,
    TokenizerRecord,
    fingerprint_of,
)
from dflash.storage import ObjectInfo, Store
from dflash.storage.files import file_sha256

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Adoption:
    """What is adopted, and as what.

    Attributes:
        source: the folder that `save_to_disk` wrote.
        root: where it becomes version 1; may be the same place.
        tokenizer: the tokenizer that made its ids.
        options: the options that it was tokenized with; later batches must have the same.
    """

    source: Store
    root: DatasetRoot
    tokenizer: TokenizerRecord
    options: TokenizeOptions

    @property
    def limits(self) -> RowLimits:
        """What every row must keep to."""
        return RowLimits(self.tokenizer.vocab_size, self.options.max_seq_len)

    def scratch(self, work: Path) -> Path:
        """Folder for the files of this adoption: another one may run on this machine, of the same folder too."""
        return work / "adopt" / fingerprint_of({"source": self.source.uri, "root": self.root.uri})[:16]

    @property
    def in_place(self) -> bool:
        """Whether the folder is the root itself."""
        return self.source.uri.rstrip("/") == self.root.store.uri.rstrip("/")


@dataclass(frozen=True, slots=True)
class _Adopted:
    """One file: its shard's entry, its record for the manifest, the rows of its index."""

    entry: ShardEntry
    file: InputFile
    rows: pa.Table


def adopt_dataset(job: Adoption, work: Path, progress: Progress | None = None) -> Manifest:
    """Publish the folder as version 1. Safe to repeat; a folder that was adopted already is found and returned.

    Args:
        job: what to adopt.
        work: local folder for downloads and rewritten shards, emptied file by file.
        progress: called with files done and files in all.

    Raises:
        DatasetError: the folder isn't a single saved dataset, or a row can't be used; names file and row.
        IncompatibleError: its columns can't be used; with a table.
        ConditionalWriteError: the store of the root can't swap a pointer safely.
        PublishConflictError: somebody changed the root meanwhile.
    """
    job.root.store.probe_conditional_writes()
    expected = _read_target(job)
    if isinstance(expected, Manifest):
        return _adopted_before(job, expected)
    files = list_data_files(job.source)
    columns = plan_columns(read_schema(_fetch(job, files[0], work)), f"{job.source.uri}/{files[0].key}")
    adopted = []
    for number, info in enumerate(files):
        adopted.append(_adopt_file(job, number, info, columns, work))
        if progress is not None:
            progress(number + 1, len(files))
    manifest = _manifest(job, adopted, columns)
    _describe(job, final=columns.identical)
    job.root.publish(manifest, expected=expected, action="adopt")
    _describe(job, final=True)
    return manifest


def _read_target(job: Adoption) -> Manifest | Pointer | None:
    """What is at the root: a version of ours, a saved dataset that is to be replaced, or nothing."""
    try:
        info = job.root.store.head(POINTER_KEY)
    except ObjectNotFoundError:
        return None
    state = read_state(job.root.store)
    if "dflash" in state:
        return job.root.manifest(None)
    if not job.in_place:
        raise DatasetError(
            f"{job.root.uri} holds another saved dataset, which adopting {job.source.uri} would replace. "
            "Name a root that is empty, or adopt that folder itself."
        )
    # Publishing needs the history (none) and the ETag of what it replaces, and the name for the loser of a race.
    found = PointerRecord(manifest="the saved dataset", manifest_sha256="", version=0, history=())
    if info.etag is None:
        raise DatasetError(f"{job.root.uri}/{POINTER_KEY}: the store gives no ETag, so it can't be replaced safely.")
    return Pointer(found, info.etag)


def _adopted_before(job: Adoption, current: Manifest) -> Manifest:
    """The version that an earlier call made of this folder; finishes what a crash left open."""
    if current.batches and current.batches[0].source == job.source.uri and "adopted" in current.notes:
        _describe(job, final=True)
        return current
    raise DatasetError(
        f"{job.root.uri} already holds {current.name} ({current.counts.num_rows} rows), which was not made from "
        f"{job.source.uri}. Adopt into a root that is empty."
    )


def _adopt_file(job: Adoption, number: int, info: ObjectInfo, columns: ColumnPlan, work: Path) -> _Adopted:
    """Check a file, put its shard and index in place, and describe it."""
    path, folder = _fetch(job, info, work), job.scratch(work)
    folder.mkdir(parents=True, exist_ok=True)
    shard, index = folder / f"{number:05d}.arrow", folder / f"{number:05d}.index.arrow"
    with ShardWriter(shard, index) as writer:
        written = write_rows(path, info.key, columns, job.limits, writer)
    digest = job.source.verify(info.key, expect=info).sha256 if path.parent != folder else file_sha256(path)
    entry = _entry(job, info, written, digest if columns.identical else None)
    if columns.identical:
        job.source.copy(info.key, job.root.store, entry.key, size=info.size, sha256=digest)
    else:
        job.root.store.put_if_absent(entry.key, shard, sha256=entry.sha256)
    job.root.meta.put_if_absent(entry.index_key, index, sha256=entry.index_sha256)
    rows = read_index(index)
    for made in (shard, index, *([path] if path.parent == folder else [])):
        made.unlink()
    item = InputFile(
        key=info.key, size=info.size, etag=info.etag, sha256=digest, num_records=written.num_rows, num_rejected=0
    )
    return _Adopted(entry, item, rows)


def _fetch(job: Adoption, info: ObjectInfo, work: Path) -> Path:
    """The file on this machine: in place in a folder, else a copy named after the very object that was listed."""
    source = job.source
    local = source.local_path(info.key)
    if local is not None:
        return local
    name = fingerprint_of({"source": source.uri, "key": info.key, "etag": info.etag, "size": info.size})
    path = job.scratch(work) / f"{name[:16]}-{Path(info.key).name}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        source.download(info.key, path, expect=info)
    return path


def _entry(job: Adoption, info: ObjectInfo, written: WrittenShard, kept: str | None) -> ShardEntry:
    """Describe a shard: the file itself where its digest is given as `kept`, else the rewritten one."""
    made_from = {"adopted": kept or written.shard.sha256, "key": info.key, "tokenizer": job.tokenizer.fingerprint}
    return ShardEntry(
        sha256=kept or written.shard.sha256,
        num_bytes=info.size if kept else written.shard.num_bytes,
        num_rows=written.num_rows,
        num_tokens=written.num_tokens,
        num_loss_tokens=written.num_loss_tokens,
        index_sha256=written.index.sha256,
        index_bytes=written.index.num_bytes,
        fingerprint=fingerprint_of(made_from),
        encoder="adopted",
    )


def _manifest(job: Adoption, adopted: Sequence[_Adopted], columns: ColumnPlan) -> Manifest:
    shards = tuple(item.entry for item in adopted)
    if len({entry.sha256 for entry in shards}) != len(shards):
        raise DatasetError(f"{job.source.uri} holds two files with the same rows. Drop the repeated rows and save it.")
    counts = Counts.of(shards)
    batch = Batch(
        source=job.source.uri,
        fingerprint=fingerprint_of({"shards": [entry.fingerprint for entry in shards]}),
        inputs=tuple(item.file for item in adopted),
        num_shards=counts.num_shards,
        num_rows=counts.num_rows,
    )
    notes = {"kept_files": columns.identical, "ignored_columns": list(columns.ignored)}
    return Manifest(
        version=1,
        parent=None,
        created_at=datetime.now(UTC).replace(microsecond=0),
        schema_version=SCHEMA_VERSION,
        code_version=CODE_VERSION,
        tokenizer=job.tokenizer,
        options=job.options,
        shards=shards,
        batches=(batch,),
        counts=counts,
        quality=_quality(adopted),
        notes={"adopted": notes},
    )


def _quality(adopted: Sequence[_Adopted]) -> dict[str, Any]:
    """What the gate would say: kept for comparison, enforced by nobody, because nothing was tokenized here.

    Sources and scripts that nobody recorded are left out, so that the next batch isn't measured against them.
    """
    rows = sum(item.rows.num_rows for item in adopted)
    tables = [item.rows for item in adopted]
    report = assess(tables, reject_reasons={}, num_records=rows, thresholds=GateThresholds())
    sources = {} if set(report.mix.sources) == {""} else report.mix.sources
    return report.model_copy(update={"mix": Baseline(sources=sources, scripts={})}).model_dump(mode="json")


def _describe(job: Adoption, *, final: bool) -> None:
    """Make `dataset_info.json` fit the files that the pointer names.

    In a folder that is adopted in place, description and pointer can't change at one stroke. Where the columns change
    too, the description is first replaced by one without features, with which `datasets` takes them from the files, old
    or new; then, when the pointer names the new files, by the one that every version has.
    """
    if not job.in_place:
        return
    store = job.root.store
    wanted = dataset_info() if final else NO_FEATURES
    try:
        info = store.head(INFO_KEY)
        found = store.read(INFO_KEY, expect=info)
    except ObjectNotFoundError:
        store.put_if_absent(INFO_KEY, wanted)
        return
    if found not in {wanted, dataset_info()}:
        store.replace(INFO_KEY, wanted, if_match=info.etag)
