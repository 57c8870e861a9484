"""Where shards and their indexes are read: this machine's spool, else the root, through its cache."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from dflash.data.dataset import DatasetRoot
from dflash.data.spool import INDEX_FILE, SHARD_FILE
from dflash.errors import IntegrityError, StorageError
from dflash.manifest import ShardEntry
from dflash.storage.files import file_sha256


@dataclass(frozen=True, slots=True)
class Spool:
    """Finished shards that wait on this machine.

    Attributes:
        folder: holds a folder for each shard, by fingerprint; runs into the same dataset share it.
        links: a folder of this run alone on the same disk. What is read is linked there first, because another run
            may put the shard in place and clear the spool meanwhile.
    """

    folder: Path
    links: Path

    def file(self, entry: ShardEntry, name: str) -> Path | None:
        """A file of a spooled shard; None where the shard isn't spooled (any more)."""
        link = self.links / f"{entry.fingerprint}-{name}"
        try:
            self.links.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(self.folder / entry.fingerprint / name, link)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{link}: {error}. Expected a folder on the disk of {self.folder}.") from error
        return link


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """Files to read: the spool's where it has them, else the root's."""

    root: DatasetRoot
    spool: Spool | None = None

    def shard(self, entry: ShardEntry) -> Path:
        """The shard's file; its rows may be copied into another, whose digest would vouch for damage.

        Raises:
            IntegrityError: it is damaged.
        """
        spooled = None if self.spool is None else self.spool.file(entry, SHARD_FILE)
        if spooled is None:
            return self.root.fetch_shard(entry)
        if (found := file_sha256(spooled)) != entry.sha256:
            raise IntegrityError(
                f"{spooled} was damaged: expected sha256 {entry.sha256}, found {found}. Run again: it is made anew."
            )
        return spooled

    def index(self, entry: ShardEntry) -> Path:
        """The file of its index."""
        spooled = None if self.spool is None else self.spool.file(entry, INDEX_FILE)
        return spooled or self.root.fetch_index(entry)
