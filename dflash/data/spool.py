"""The folder in which finished shards wait for their upload, and what a job to make one says.

A shard lies in a folder named by its fingerprint, which appears by one rename when it is whole: a folder that is
there is a shard that is done.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash.config import TokenizeOptions
from dflash.errors import DatasetError
from dflash.manifest import ShardReceipt
from dflash.storage.files import file_sha256

SHARD_FILE, INDEX_FILE, REJECTS_FILE, RECEIPT_FILE = "shard.arrow", "index.arrow", "rejects.jsonl", "receipt.json"
ABANDONED_S = 86_400


@dataclass(frozen=True, slots=True)
class LocalInput:
    """A file to read: its key, where it lies, its size, ETag and SHA-256.

    Attributes:
        is_own: whether this run downloaded it, into a folder where nobody else writes.
    """

    key: str
    path: Path
    size: int
    etag: str | None
    sha256: str
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class ShardJob:
    """What a worker process needs to make one shard.

    Attributes:
        fingerprint: names the spool folder and the receipt.
        inputs: local files in order.
        options: decide ids and mask.
        spool: folder in which the result folder appears.
        encoder: `auto` or `huggingface`; the ids are the same.
    """

    fingerprint: str
    inputs: tuple[LocalInput, ...]
    options: TokenizeOptions
    spool: Path
    encoder: Literal["auto", "huggingface"] = "auto"

    @property
    def result(self) -> Path:
        """Folder of the finished shard."""
        return self.spool / self.fingerprint


def read_spooled(result: Path) -> ShardReceipt | None:
    """Receipt of a finished spool folder whose files are whole; None where there is none.

    A damaged folder (a digest differs) counts as none, so the shard is made again.
    """
    try:
        receipt = ShardReceipt.from_bytes((result / RECEIPT_FILE).read_bytes(), str(result / RECEIPT_FILE))
        entry = receipt.shard
        whole = (
            file_sha256(result / SHARD_FILE) == entry.sha256
            and file_sha256(result / INDEX_FILE) == entry.index_sha256
            and receipt.rejects_sha256 in {None, file_sha256(result / REJECTS_FILE)}
        )
    except (OSError, DatasetError):
        return None
    return receipt if whole else None


def remove_spooled(result: Path) -> None:
    """Remove a spool folder: it disappears at once by a rename, so that a kill leaves it whole or gone."""
    doomed = result.with_name(f".{result.name[:12]}-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        result.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    if doomed.is_file():
        doomed.unlink()
