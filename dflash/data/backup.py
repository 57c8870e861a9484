"""Backups of a dataset: a backup is a dataset root of its own, so every tool that reads one reads the other.

A mirror lies at `<root>.backups` or where the user says, another bucket or a local folder included. Backing up copies
the shards that the mirror lacks, then publishes the same manifest there: the mirror's pointer history is the record of
all backups. Shards are content-addressed, so the second backup copies only what the merge added.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from dflash.data.copying import Progress, copy_shards, copy_version, silent
from dflash.data.dataset import DatasetRoot
from dflash.errors import PublishConflictError, UsageError
from dflash.manifest import Manifest
from dflash.storage import S3Credentials

RECORD_ATTEMPTS: Final = 5  # races against other backups that recording one may lose in a row


@dataclass(frozen=True, slots=True)
class BackupRecord:
    """What a backup did; bytes are those of shards and indexes.

    Attributes:
        target: the mirror.
        manifest: name of the version.
        shards_mended: shards that lay there damaged and were replaced.
    """

    target: str
    manifest: str
    shards_kept: int
    shards_copied: int
    shards_mended: int
    bytes_copied: int

    def to_json(self) -> dict[str, Any]:
        """For `--json` and artifacts."""
        return asdict(self)


def open_mirror(root: DatasetRoot, target: str | None, credentials: S3Credentials | None = None) -> DatasetRoot:
    """The mirror of a root: `<root>.backups` unless another URI is given.

    Raises:
        UsageError: the mirror would be the root, or lie in it, where readers would copy it and one mishap takes both.
    """
    mirror = DatasetRoot.open(target or f"{root.uri}.backups", credentials, root.cache)
    inside = [f"{place.rstrip('/')}/" for place in (root.store.uri, root.meta.uri)]
    if any(f"{mirror.store.uri.rstrip('/')}/".startswith(place) for place in inside):
        raise UsageError(
            f"The backup {mirror.uri} lies in the dataset {root.uri}. Name a place outside, such as {root.uri}.backups."
        )
    return mirror


def backup_version(
    root: DatasetRoot, manifest: Manifest, mirror: DatasetRoot, progress: Progress = silent, *, check: bool = False
) -> BackupRecord:
    """Copy a published version into the mirror and publish it there. A version that is there already costs a look.

    Args:
        root: the dataset.
        manifest: a published version of it.
        mirror: where to.
        progress: called with shards done and shards in all.
        check: also read through what the mirror holds already.

    Raises:
        DatasetError: the root itself lacks a shard.
        IntegrityError: a shard of the root is damaged, or a copy differs.
        ConditionalWriteError: the mirror's store can't swap a pointer safely.
        PublishConflictError: other backups into this mirror won every time; run again.
    """
    if mirror.pointer() is None:
        mirror.store.probe_conditional_writes()
    counts = copy_version(root, mirror, manifest, progress, check=check)
    _record(root, mirror, manifest)
    return BackupRecord(mirror.uri, manifest.name, **asdict(counts))


def _record(root: DatasetRoot, mirror: DatasetRoot, manifest: Manifest) -> None:
    """Publish in the mirror; two merges that back up the same version at once both find it recorded.

    A version that the mirror has recorded before is recorded again only while it is the root's current one: a slow
    merge that is about to lose its race must not make an old version the newest backup.
    """
    for attempt in range(1, RECORD_ATTEMPTS + 1):
        pointer = mirror.pointer()
        if pointer is not None and any(move.manifest == manifest.name for move in pointer.record.history):
            current = root.pointer()
            is_current = current is not None and current.record.manifest == manifest.name
            if pointer.record.manifest == manifest.name or not is_current:
                return
        try:
            mirror.publish(manifest, expected=pointer)
        except PublishConflictError:
            if attempt == RECORD_ATTEMPTS:
                raise


def rollback(
    root: DatasetRoot, version: int | str, mirror: DatasetRoot | None = None, progress: Progress = silent
) -> Manifest:
    """Make a published version current again: one conditional replacement of the pointer.

    Shards that `collect_garbage` moved out are fetched from the mirror first.

    Raises:
        DatasetError: no such version, or its shards are neither here nor in the mirror.
        PublishConflictError: another publisher won.
    """
    pointer = root.pointer()
    manifest = root.manifest(version)
    if pointer is not None and pointer.record.manifest == manifest.name:
        return manifest
    if mirror is not None and root.missing_shards(manifest.shards):
        copy_shards(mirror, root, manifest.shards, progress)
    root.publish(manifest, expected=pointer, action="rollback")
    return manifest
