"""Local folders of a run, and how its files and shards are grouped and named."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.data.plan import PlannedFile
from dflash.errors import DatasetError
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
