r"""Finished records on the local disk, until a part of the batch holds them.

Records are appended to `open.jsonl`, one line each; when it holds a part's worth it is renamed to `full-NNNNN.jsonl`
and stays until that part is on the store. A kill leaves whole lines and maybe a torn last one, which is dropped: what
is lost are requests in flight, never a finished record.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from dflash.data.strict_json import parse_json
from dflash.errors import UsageError
from dflash.generate.looks import Look
from dflash.generate.part_index import NOT_A_RECORD, checked_look
from dflash.storage.files import os_errors_as_storage_errors
from dflash.storage.location import parse_uri

OPEN = "open.jsonl"
FAILURES = "failures.ndjson"


class Spool:
    """A folder for one batch, used by one process at a time.

    Attributes:
        folder: where it lies; its name depends on the batch's URI alone.
        part_records: records that make a part.
        part_bytes: bytes that make a part, however few records it has.
    """

    def __init__(self, work: Path, batch: str, part_records: int, part_bytes: int) -> None:
        name = hashlib.sha256(parse_uri(batch).uri.encode()).hexdigest()[:24]
        self.folder = work / f"generate-{name}"
        self.part_records = part_records
        self.part_bytes = part_bytes
        self.num_open = 0
        self._open_bytes = 0
        self._batch = batch
        self._file: IO[bytes] | None = None
        self._failures: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Lock the folder and mend what a kill left.

        Raises:
            UsageError: another process on this machine generates into the batch.
            StorageError: the folder can't be made or read.
        """
        with os_errors_as_storage_errors(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise UsageError(
                    f"Another process on this machine generates into {self._batch}. Wait for it, or stop it first."
                ) from None
            self._mend()
            self._file = (self.folder / OPEN).open("ab")
            self._failures = (self.folder / FAILURES).open("wb")
        return self

    def __exit__(self, *exc: object) -> None:
        for file in (self._file, self._failures, self._lock):
            if file is not None:
                with suppress(OSError):  # the write that failed was told of; closing tries it again
                    file.close()

    def append(self, record: dict[str, Any]) -> Path | None:
        """Keep a record; return the full file when it completed one."""
        assert self._file is not None, "the spool is open inside its context"
        line = msgspec.json.encode(record) + b"\n"
        with os_errors_as_storage_errors(str(self.folder)):
            self._file.write(line)
            self._file.flush()
        self.num_open += 1
        self._open_bytes += len(line)
        is_full = self.num_open >= self.part_records or self._open_bytes >= self.part_bytes
        return self.close_part() if is_full else None

    def close_part(self) -> Path | None:
        """Turn what is open into a full file; None where nothing is."""
        assert self._file is not None, "the spool is open inside its context"
        if not self.num_open:
            return None
        with os_errors_as_storage_errors(str(self.folder)):
            os.fsync(self._file.fileno())
            self._file.close()
            numbers = [int(path.stem.removeprefix("full-")) for path in self.full()]
            path = self.folder / f"full-{max(numbers, default=-1) + 1:05d}.jsonl"
            (self.folder / OPEN).rename(path)
            self._file = (self.folder / OPEN).open("ab")
        self.num_open = self._open_bytes = 0
        return path

    def full(self) -> list[Path]:
        """Files that wait for their place in the batch, oldest first."""
        return sorted(self.folder.glob("full-*.jsonl"))

    def give_up(self, failure: dict[str, Any]) -> None:
        """Note a prompt that failed."""
        assert self._failures is not None, "the spool is open inside its context"
        with os_errors_as_storage_errors(str(self.folder)):
            self._failures.write(msgspec.json.encode(failure) + b"\n")
            self._failures.flush()

    def forget_failures(self) -> None:
        """Begin the list anew."""
        assert self._failures is not None, "the spool is open inside its context"
        with os_errors_as_storage_errors(str(self.folder)):
            self._failures.truncate(0)
            self._failures.seek(0)

    def failures(self) -> bytes:
        """All that `give_up` noted since then."""
        return (self.folder / FAILURES).read_bytes()

    def open_records(self) -> Iterator[dict[str, Any]]:
        """Records of the open file."""
        return (parse_json(line) for line, _ in read_lines(self.folder / OPEN))

    def open_looks(self) -> Iterator[Look]:
        """What is counted of those records."""
        return (look for _, look in read_lines(self.folder / OPEN))

    def _mend(self) -> None:
        """Drop torn or damaged lines of the open file, and count what is left."""
        path = self.folder / OPEN
        if not path.exists():
            return
        lines = [line for line, _ in read_lines(path)]
        whole = b"".join(lines)
        if path.stat().st_size != len(whole):
            mended = path.with_suffix(".mended")
            mended.write_bytes(whole)
            mended.rename(path)
        self.num_open, self._open_bytes = len(lines), len(whole)


def read_lines(path: Path) -> Iterator[tuple[bytes, Look]]:
    """Whole lines of a spool file with what is counted of their records; torn or damaged ones are passed over."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                look = checked_look(parse_json(line[:-1]))
            except NOT_A_RECORD:
                continue
            yield line, look
