"""Backups of a dataset: a backup is a dataset root of its own, so every tool that reads one reads the other.

A mirror lies at `<root>.backups` or where the user says, another bucket or a local folder included. Backing up copies
the shards that the mirror lacks (by the server itself where it can), then publishes the same manifest there.
Shards are content-addressed, so the second backup copies only what the merge added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dflash.data.dataset import DatasetRoot
from dflash.errors import DatasetError, IntegrityError
from dflash.manifest import Manifest, ShardEntry
from dflash.storage import S3Credentials, Store

COPIES_AT_ONCE = 4  # a server copies at 40 to 70 MB/s whatever the number of requests
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BackupRecord:
    """What a backup or a restore did; bytes are those of shards and indexes."""

    target: str
    manifest: str
    shards_copied: int
    shards_kept: int
    bytes_copied: int

    def to_json(self) -> dict[str, Any]:
        """For `--json` and artifacts."""
        return {name: getattr(self, name) for name in self.__slots__}


def open_mirror(root: DatasetRoot, target: str | None, credentials: S3Credentials | None = None) -> DatasetRoot:
    """The mirror of a root: `<root>.backups` unless another URI is given."""
    return DatasetRoot.open(target or f"{root.uri}.backups", credentials, root.cache)


def backup_version(
    root: DatasetRoot, manifest: Manifest, mirror: DatasetRoot, progress: Progress = lambda _done, _total: None
) -> BackupRecord:
    """Copy a published version into the mirror and publish it there. A version that is there already costs a listing.

    Args:
        root: the dataset.
        manifest: a published version of it.
        mirror: where to.
        progress: called with shards done and shards in all.

    Raises:
        IntegrityError: a copy differs in size or digest.
        PublishConflictError: another backup into this mirror won; run again.
    """
    record = replace(copy_shards(root, mirror, manifest.shards, progress), manifest=manifest.name)
    pointer = mirror.pointer()
    if pointer is None or pointer.record.manifest != manifest.name:
        mirror.publish(manifest, expected=pointer, action="publish")
    return record


def restore_version(
    mirror: DatasetRoot,
    root: DatasetRoot,
    version: int | str | None = None,
    progress: Progress = lambda _done, _total: None,
) -> BackupRecord:
    """Rebuild a root, whole or in part, from a version in the mirror, and make that version current.

    Shards that the root still holds whole are kept; missing ones are copied, and one whose size is wrong is replaced
    by one conditional write.

    Raises:
        DatasetError: the mirror has no such version.
        PublishConflictError: the root was published to meanwhile.
    """
    manifest = mirror.manifest(version)
    expected = root.pointer()
    mend_shards(mirror, root, manifest.shards)
    record = replace(copy_shards(mirror, root, manifest.shards, progress), manifest=manifest.name)
    root.publish(manifest, expected=expected, action="restore")
    return record


def rollback(root: DatasetRoot, version: int | str, mirror: DatasetRoot | None = None) -> Manifest:
    """Make a published version current again: one conditional replacement of the pointer.

    Shards that `gc` moved out are fetched from the mirror first.

    Raises:
        DatasetError: no such version, or its shards are neither here nor in the mirror.
        PublishConflictError: another publisher won.
    """
    pointer = root.pointer()
    manifest = root.manifest(version)
    if pointer is not None and pointer.record.manifest == manifest.name:
        return manifest
    missing = root.missing_shards(manifest.shards)
    if missing and mirror is not None:
        copy_shards(mirror, root, missing)
    root.publish(manifest, expected=pointer, action="rollback")
    return manifest


def mend_shards(mirror: DatasetRoot, root: DatasetRoot, entries: Iterable[ShardEntry]) -> int:
    """Replace objects whose size differs from the manifest by the mirror's; return how many.

    Replaced in one conditional write, never deleted first: a crash leaves the damaged or the whole object.
    """
    sizes = {item.key: item for item in root.store.list("shards")}
    num_mended = 0
    for entry in entries:
        stored = sizes.get(entry.key)
        if stored is not None and stored.size != entry.num_bytes:
            data = mirror.store.read(entry.key, sha256=entry.sha256)
            root.store.replace(entry.key, data, if_match=stored.etag or root.store.head(entry.key).etag)
            num_mended += 1
    return num_mended


def copy_shards(
    source: DatasetRoot,
    target: DatasetRoot,
    entries: Iterable[ShardEntry],
    progress: Progress = lambda _done, _total: None,
) -> BackupRecord:
    """Copy shards, their indexes and receipts that the target lacks; each is compared in size and digest.

    Raises:
        DatasetError: the source lacks one.
        IntegrityError: a copy differs.
    """
    wanted = list(entries)
    lacking = target.missing_shards(wanted)
    gone = [entry.key for entry in source.missing_shards(lacking)]
    if gone:
        raise DatasetError(
            f"{source.uri} lacks {len(gone)} shards that are to be copied to {target.uri}, first {gone[0]}. "
            "Restore them from another backup, or tokenize them again."
        )
    with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
        for done, _ in enumerate(threads.map(lambda entry: _copy_entry(source, target, entry), lacking), start=1):
            progress(len(wanted) - len(lacking) + done, len(wanted))
    left = target.missing_shards(lacking)
    if left:
        raise IntegrityError(f"{target.uri} lacks {left[0].key} right after it was copied there. Run again.")
    return BackupRecord(
        target=target.uri,
        manifest="",
        shards_copied=len(lacking),
        shards_kept=len(wanted) - len(lacking),
        bytes_copied=sum(entry.num_bytes + entry.index_bytes for entry in lacking),
    )


def _copy_entry(source: DatasetRoot, target: DatasetRoot, entry: ShardEntry) -> None:
    """Index first: a shard that is there has its index."""
    _copy(source.meta, target.meta, entry.index_key, entry.index_bytes, entry.index_sha256)
    _copy(source.store, target.store, entry.key, entry.num_bytes, entry.sha256)


def _copy(source: Store, target: Store, key: str, size: int, sha256: str) -> None:
    source.copy(key, target, key, size=size, sha256=sha256)
