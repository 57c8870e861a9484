"""Files that appear whole or not at all, and digests that are taken while the bytes pass."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import IntegrityError, StorageError

try:
    from dflash.storage import _md5_lanes
except ImportError:  # no compiler when the package was installed
    _md5_lanes = None  # type: ignore[assignment]

CHUNK_BYTES = 1 << 20  # the kernel takes three times as long a byte for larger pieces
_HIDDEN = re.compile(r"\..+\.(part|lock)")
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Digest:
    """Size and hex digests of a run of bytes; `md5` is empty where nobody asked for it."""

    size: int
    sha256: str
    md5: str = ""


def is_hidden(name: str) -> bool:
    """Tell whether a file name is one of ours that no listing shows: a part file or a lock."""
    return _HIDDEN.fullmatch(name) is not None


def lock_path(path: Path) -> Path:
    """Return the lock file beside a file."""
    return path.with_name(f".{path.name}.lock")


def part_path(path: Path) -> Path:
    """Return a hidden name beside `path` that no other writer uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{next(_serial)}-{os.urandom(4).hex()}.part")


def write_part(path: Path, chunks: Iterable[bytes], *, with_md5: bool = False) -> Digest:
    """Write chunks to `path` and flush them to the disk; on any failure the file is removed.

    Returns:
        Size and digests of what was written.
    """
    with os_errors_as_storage_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                digest = digest_chunks(tee(chunks, file.write), with_md5=with_md5)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            remove_part(path)
            raise
    return digest


def remove_part(path: Path) -> None:
    """Remove a part file if it is there; failing at that must not hide why it is removed."""
    with suppress(OSError):
        path.unlink()


def tee(chunks: Iterable[bytes], write: Callable[[bytes], object]) -> Iterator[bytes]:
    """Pass chunks on after handing each to `write`."""
    for chunk in chunks:
        write(chunk)
        yield chunk


def move_into_place(part: Path, path: Path) -> None:
    """Rename a finished part file over `path` and make the rename durable."""
    with os_errors_as_storage_errors(str(path)):
        part.replace(path)
        sync_path(path.parent)


@contextmanager
def os_errors_as_storage_errors(where: str) -> Iterator[None]:
    """Translate failures of the file system."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{where}: the file system failed: {error}") from error


def source_size(source: bytes | Path) -> int:
    """Return the size of what is to be stored.

    Raises:
        StorageError: the file is missing or can't be looked at.
    """
    if isinstance(source, bytes):
        return len(source)
    with os_errors_as_storage_errors(f"source {source}"):
        return source.stat().st_size


def sync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_chunks(path: Path) -> Iterator[bytes]:
    """Read a file in chunks."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def digest_chunks(chunks: Iterable[bytes], *, with_md5: bool = False) -> Digest:
    """Consume chunks and return their size and digests."""
    sha256 = hashlib.sha256()
    md5 = hashlib.md5(usedforsecurity=False)
    size = 0
    for chunk in chunks:
        size += len(chunk)
        sha256.update(chunk)
        if with_md5:
            md5.update(chunk)
    return Digest(size, sha256.hexdigest(), md5.hexdigest() if with_md5 else "")


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_md5(paths: Sequence[Path]) -> list[str]:
    """MD5 (hex) of each file; native code, where it was built, takes eight of them at a time.

    All are mapped at once: for some dozens of files that nobody else cuts, which would end the process.
    """
    with ExitStack() as stack:
        contents = [_map(path, stack) for path in paths]
        if _md5_lanes is None:
            return [hashlib.md5(content, usedforsecurity=False).hexdigest() for content in contents]
        return [digest.hex() for digest in _md5_lanes.md5_of_each(contents)]


def _map(path: Path, stack: ExitStack) -> mmap.mmap | bytes:
    with os_errors_as_storage_errors(str(path)), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # can't be mapped
        return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def check_digest(where: str, digest: Digest, *, size: int | None, sha256: str | None) -> None:
    """Compare what arrived with what was promised.

    Raises:
        IntegrityError: size or sha256 differ.
    """
    if size is not None and digest.size != size:
        raise IntegrityError(f"{where}: expected {size} bytes, found {digest.size}; it is cut, or was replaced")
    if sha256 is not None and digest.sha256 != sha256.lower():
        raise IntegrityError(
            f"{where}: expected sha256 {sha256}, found {digest.sha256} over {digest.size} bytes; the content is damaged"
        )
