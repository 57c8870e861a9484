"""A folder behind the store contract: atomic renames, links and locks of the file system."""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import (
    ConditionalWriteError,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionError,
    StorageError,
    UsageError,
)
from dflash.storage.files import (
    Digest,
    check_digest,
    digest_chunks,
    file_chunks,
    is_hidden,
    lock_path,
    move_into_place,
    os_errors_as_storage_errors,
    part_path,
    remove_part,
    source_size,
    sync_path,
    tee,
    write_part,
)
from dflash.storage.location import check_key, check_prefix
from dflash.storage.store import ObjectInfo, Store, Transfer, TransferCounts, UploadInfo

_ETAG_BYTES = 4 << 20  # files up to here have their sha256 as ETag; larger ones are immutable and known by their key


class LocalStore(Store):
    """A folder of the local file system, which is made at the first write.

    Links that leave the folder are refused: a key must not reach what lies outside.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = Path(root)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str]]:
        return (LocalStore, (str(self.root),))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See `Store.list`; without ETags, since no content is read."""
        with _as_storage_error(self.uri):
            files = [path for path in self._walk(prefix) if not is_hidden(path.name)]
            stats = [(path, path.stat()) for path in files]
            infos = [ObjectInfo(self._key(path), stat.st_size, modified_s=stat.st_mtime) for path, stat in stats]
        return sorted(infos, key=lambda info: info.key)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`; files over 4 MiB have no ETag."""
        path = self._path(key)
        with _as_storage_error(self._uri(key)):
            size = path.stat().st_size
            etag = _digest_file(path).sha256 if size <= _ETAG_BYTES else None
        return ObjectInfo(key, size, etag)

    def read(
        self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None, max_bytes: int | None = None
    ) -> bytes:
        """See `Store.read`."""
        path = self._path(key)
        chunks: list[bytes] = []
        with _as_storage_error(self._uri(key)):
            size = path.stat().st_size
            if max_bytes is not None and size > max_bytes:
                raise StorageError(f"{self._uri(key)}: has {size} bytes, at most {max_bytes} are read into memory here")
            digest = digest_chunks(tee(file_chunks(path), chunks.append))
        self._check(key, digest, expect, sha256)
        return b"".join(chunks)

    def download(
        self, key: str, path: Path, *, expect: ObjectInfo | None = None, sha256: str | None = None
    ) -> Transfer:
        """See `Store.download`."""
        part = part_path(path)
        try:
            with _as_storage_error(self._uri(key)):
                source = self._path(key)
                size = source.stat().st_size
                digest = write_part(part, file_chunks(source))
            check_digest(self._uri(key), digest, size=size, sha256=None)
            self._check(key, digest, expect, sha256)
            move_into_place(part, path)
        finally:
            remove_part(part)
        return _transfer(digest, sha256)

    def verify(self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None) -> Transfer:
        """See `Store.verify`."""
        with _as_storage_error(self._uri(key)):
            digest = _digest_file(self._path(key))
        self._check(key, digest, expect, sha256)
        return _transfer(digest, sha256)

    def put_if_absent(self, key: str, source: bytes | Path, *, sha256: str | None = None) -> bool:
        """See `Store.put_if_absent`; by a hard link, which fails where the name is taken."""
        path = self._path(key, for_writing=True)
        part = part_path(path)
        chunks = [source] if isinstance(source, bytes) else file_chunks(source)
        size = source_size(source)
        try:
            with _as_storage_error(self._uri(key)):
                digest = write_part(part, chunks)
                check_digest(f"source of {self._uri(key)}", digest, size=size, sha256=sha256)
                try:
                    os.link(part, path)
                except FileExistsError:
                    self._check_same(key, path, digest)
                    return False
                sync_path(path.parent)
        finally:
            remove_part(part)
        self.counters.add(TransferCounts(bytes_up=digest.size, requests=1))
        return True

    def replace(self, key: str, data: bytes, *, if_match: str | None) -> str:
        """See `Store.replace`; under a lock beside the file, by an atomic rename."""
        path = self._path(key, for_writing=True)
        etag = hashlib.sha256(data).hexdigest()
        with _as_storage_error(self._uri(key)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(lock_path(path)):
                found = _digest_file(path).sha256 if path.exists() else None
                if found == etag:
                    return etag
                if found != if_match:
                    raise PreconditionError(
                        f"{self._uri(key)}: expected {if_match or 'no object'}, found {found or 'no object'}; "
                        "another writer was first: read it again and decide anew"
                    )
                part = part_path(path)
                write_part(part, [data])
                move_into_place(part, path)
        self.counters.add(TransferCounts(bytes_up=len(data), requests=1))
        return etag

    def copy(
        self, source_key: str, target_store: Store, target_key: str, *, size: int, sha256: str | None = None
    ) -> Transfer:
        """See `Store.copy`; real bytes even inside one folder, so that damage to one file doesn't reach its backup."""
        path = self._path(source_key)
        with _as_storage_error(self._uri(source_key)):
            digest = _digest_file(path)
        check_digest(self._uri(source_key), digest, size=size, sha256=sha256)
        target_store.put_if_absent(target_key, path, sha256=digest.sha256)
        self.counters.add(TransferCounts(bytes_copied=digest.size, requests=1))
        return Transfer(digest.size, digest.sha256, digest.sha256, "sha256")

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        for key in keys:
            path = self._path(key, for_writing=True)
            with _as_storage_error(self._uri(key)):
                path.unlink(missing_ok=True)

    def list_uploads(self, prefix: str = "") -> tuple[UploadInfo, ...]:
        """See `Store.list_uploads`: part files, which a writer that was killed leaves behind."""
        with _as_storage_error(self.uri):
            parts = [path for path in self._walk(prefix) if is_hidden(path.name) and path.name.endswith(".part")]
        uploads = [UploadInfo(self._key(p.with_name(p.name[1:].rsplit(".", 2)[0])), p.name) for p in parts]
        return tuple(sorted(uploads, key=lambda upload: (upload.key, upload.upload_id)))

    def abort_upload(self, upload: UploadInfo) -> None:
        """See `Store.abort_upload`."""
        if "/" in upload.upload_id or not is_hidden(upload.upload_id):
            raise UsageError(f"{upload.upload_id!r} names no unfinished upload in {self.uri}")
        with _as_storage_error(self._uri(upload.key)):
            self._path(upload.key).with_name(upload.upload_id).unlink(missing_ok=True)

    def identify(self, info: ObjectInfo) -> str:
        """See `Store.identify`; reads the file."""
        path = self._path(info.key)
        with _as_storage_error(self._uri(info.key)):
            digest = _digest_file(path)
        self._check(info.key, digest, info, None)
        return f"sha256:{digest.sha256}"

    def local_path(self, key: str) -> Path | None:
        """See `Store.local_path`; the file need not exist."""
        return self._path(key)

    def probe_conditional_writes(self) -> None:
        """See `Store.probe_conditional_writes`: links and locks work here."""
        key = f"dflash-probe-{uuid.uuid4().hex}"
        try:
            self.put_if_absent(key, b"first")
            self.replace(key, b"second", if_match="another")
        except PreconditionError:
            return
        except StorageError as error:
            raise ConditionalWriteError(f"{self.uri}: this file system can't guard writes: {error}") from error
        finally:
            self.delete([key])
            with _as_storage_error(self.uri):
                lock_path(self.root / key).unlink(missing_ok=True)
        raise ConditionalWriteError(f"{self.uri}: this file system does not enforce conditional writes")

    def _walk(self, prefix: str) -> Iterator[Path]:
        """Yield all files under a folder prefix; links to folders are refused, never passed over."""
        checked = check_prefix(prefix)
        top = self._path(checked) if checked else self.root
        for folder, folders, names in os.walk(top, onerror=_raise_unless_missing):
            for name in folders:
                if (Path(folder) / name).is_symlink():
                    raise UsageError(f"{Path(folder) / name}: links to folders are not followed; name the real folder")
            for name in names:
                path = self._path(self._key(Path(folder) / name))
                if path.is_file():
                    yield path
                elif os.path.lexists(path):  # else it was removed or renamed meanwhile
                    raise UsageError(f"{path}: expected a file, found a pipe, a device or a link to nothing; remove it")

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _path(self, key: str, *, for_writing: bool = False) -> Path:
        """Return the file of a key, which lies in the root even after all links are followed."""
        path = self.root / check_key(key)
        if for_writing and is_hidden(path.name):
            raise UsageError(f"key {key!r} can't be used in a folder: such names are its part files and locks")
        try:
            inside = path.resolve().is_relative_to(self.root.resolve())
        except RuntimeError:  # what Python 3.11 says of links that lead to themselves
            raise UsageError(f"{path}: the link leads to itself; remove it") from None
        if not inside:
            raise UsageError(f"{path}: a link leads out of {self.root}; nothing outside is read or written")
        return path

    def _check(self, key: str, digest: Digest, expect: ObjectInfo | None, sha256: str | None) -> None:
        self.counters.add(TransferCounts(bytes_down=digest.size, requests=1))
        if expect is not None and expect.etag not in {None, digest.sha256}:
            raise PreconditionError(f"{self._uri(key)}: was replaced since it was looked at; list it again")
        check_digest(self._uri(key), digest, size=None if expect is None else expect.size, sha256=sha256)

    def _check_same(self, key: str, path: Path, digest: Digest) -> None:
        found = _digest_file(path)
        if found != digest:
            raise IntegrityError(
                f"{self._uri(key)}: is there already with other content ({found.size} bytes, sha256 {found.sha256}; "
                f"{digest.size} bytes, {digest.sha256} were to be stored): remove it or take another key"
            )

    def _uri(self, key: str) -> str:
        return f"{self.uri}/{key}"


def _digest_file(path: Path) -> Digest:
    return digest_chunks(file_chunks(path))


def _transfer(digest: Digest, sha256: str | None) -> Transfer:
    etag = digest.sha256 if digest.size <= _ETAG_BYTES else None
    return Transfer(digest.size, digest.sha256, etag, "size" if sha256 is None else "sha256")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file; the system frees it when the holder dies.

    The file stays: removing it would let a writer that waits for it and a new one in together.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _as_storage_error(where: str) -> Iterator[None]:
    """Translate failures of the file system; a missing file is a missing object."""
    with os_errors_as_storage_errors(where):
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectNotFoundError(f"{where}: no such object") from error
