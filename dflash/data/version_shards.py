"""The shards of one published version as training reads them.

Pinned to a manifest: what is merged meanwhile changes nothing, since shards are immutable and a version names its own.
"""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from dflash.data.dataset import DatasetRoot
from dflash.errors import DamagedDatasetError, IntegrityError, ObjectNotFoundError
from dflash.manifest import Manifest, ShardEntry
from dflash.storage.files import file_sha256

# The reader's own shard, one that waits for it, and one that is being fetched.
IN_USE = 3


class VersionShards:
    """A `ShardSource` over a dataset root.

    Rows and tokens come from the manifest alone. Shards of a local root are read in place. Those of a root on S3 are
    downloaded into a folder that stays within `max_bytes`, and at the least holds the three newest: the batch order
    fetches the next shard in the background while one is read. A file that is removed while it is mapped stays
    readable. Each shard is compared with its SHA-256 the first time it is used.

    Args:
        root: the dataset.
        manifest: a version of it.
        folder: for downloads, of this process alone; what an earlier process left there is used after a check.
        max_bytes: of downloads.
    """

    def __init__(self, root: DatasetRoot, manifest: Manifest, folder: Path, max_bytes: int) -> None:
        self._root = root
        self._manifest = manifest
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._checked: set[str] = set()
        self._kept: OrderedDict[str, int] = OrderedDict()
        for path in sorted(folder.glob("*.arrow"), key=lambda path: path.stat().st_mtime):
            self._kept[path.stem] = path.stat().st_size

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of each shard."""
        return tuple(entry.num_rows for entry in self._manifest.shards)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each shard."""
        return tuple(entry.num_tokens for entry in self._manifest.shards)

    def fetch(self, index: int) -> Path:
        """Return a file that holds shard `index`, checked against the manifest.

        Raises:
            DamagedDatasetError: the shard is missing or its bytes aren't those of the manifest.
            StorageError: the store failed.
        """
        entry = self._manifest.shards[index]
        with self._lock:
            try:
                local = self._root.store.local_path(entry.key)
                return self._download(entry) if local is None else self._in_place(entry, local)
            except (IntegrityError, ObjectNotFoundError) as error:
                raise DamagedDatasetError(
                    f"Shard {index} of {self._manifest.name} in {self._root.uri} can't be used: {error}. "
                    "Restore it with `dflash restore`, then start the run again: it goes on from its checkpoint."
                ) from error

    def close(self) -> None:
        """Remove the downloads."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._kept.clear()

    def _in_place(self, entry: ShardEntry, path: Path) -> Path:
        if entry.sha256 not in self._checked:
            self._root.store.verify(entry.key, sha256=entry.sha256)
            self._checked.add(entry.sha256)
        return path

    def _download(self, entry: ShardEntry) -> Path:
        path = self._folder / f"{entry.sha256}.arrow"
        if not self._is_kept_whole(entry, path):
            self._kept[entry.sha256] = entry.num_bytes
            self._make_room()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._root.store.download(entry.key, path, sha256=entry.sha256)
            self._checked.add(entry.sha256)
        self._kept.move_to_end(entry.sha256)
        return path

    def _is_kept_whole(self, entry: ShardEntry, path: Path) -> bool:
        if entry.sha256 not in self._kept or not path.is_file():
            return False
        if entry.sha256 not in self._checked and file_sha256(path) != entry.sha256:
            path.unlink()
            return False
        self._checked.add(entry.sha256)
        return True

    def _make_room(self) -> None:
        """Remove the shards that were used longest ago; the newest of `_kept` is about to be fetched."""
        while sum(self._kept.values()) > self._max_bytes and len(self._kept) > IN_USE:
            oldest, _ = self._kept.popitem(last=False)
            (self._folder / f"{oldest}.arrow").unlink(missing_ok=True)
