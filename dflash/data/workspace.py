"""Local folders of a run, and how its files and shards are grouped and named."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.data.plan import PlannedFile
from dflash.data.spool import ABANDONED_S
from dflash.errors import DatasetError, StorageError
from dflash.manifest import ShardEntry, ShardReceipt


@dataclass(frozen=True, slots=True)
class Workspace:
    """Local folders of a run: `work` for downloads and spooled shards, `cache` for copies of immutable objects."""

    work: Path
    cache: Path

    @property
    def spool(self) -> Path:
        """Folder of finished shards that wait for the gate and the upload."""
        return self.work / "spool"


def make_download_folder(workspace: Workspace) -> Path:
    """A folder for one session's downloads; those that killed sessions left are removed after a day.

    Raises:
        StorageError: the working folder can't be made or written.
    """
    try:
        workspace.work.mkdir(parents=True, exist_ok=True)
        for folder in workspace.work.glob("downloads-*"):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix="downloads-", dir=workspace.work))
    except OSError as error:
        raise StorageError(
            f"{workspace.work}: {error}. Expected a folder that can be written; see DFLASH_HOME."
        ) from error


def shards_with_rows(receipts: Iterable[ShardReceipt]) -> tuple[ShardEntry, ...]:
    """The shards that a manifest names, in order: files without records give a shard without rows.

    Raises:
        DatasetError: two groups of files gave the very same rows; names the files.
    """
    first: dict[str, ShardReceipt] = {}
    for receipt in receipts:
        twin = first.setdefault(receipt.shard.sha256, receipt)
        if receipt.shard.num_rows and twin is not receipt:
            raise DatasetError(
                f"The files from {twin.inputs[0].key} and from {receipt.inputs[0].key} give the very same rows: "
                "the same completions lie there twice. Remove one of them and run again."
            )
    return tuple(receipt.shard for receipt in first.values() if receipt.shard.num_rows)


def group_files(files: Sequence[PlannedFile], size: int) -> list[tuple[PlannedFile, ...]]:
    """Cut a shard's files into download tasks of at most `size` files."""
    starts = range(0, len(files), size)
    return [tuple(itertools.islice(files, start, start + size)) for start in starts]
