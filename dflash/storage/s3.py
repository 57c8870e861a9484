"""S3 behind the store contract: pinned and checked reads, conditional writes, lost replies told from conflicts."""

from __future__ import annotations

import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dflash.errors import ConditionalWriteError, IntegrityError, ObjectNotFoundError, PreconditionError, StorageError
from dflash.storage.files import (
    Digest,
    check_digest,
    digest_chunks,
    file_chunks,
    files_md5,
    move_into_place,
    os_errors_as_storage_errors,
    part_path,
    remove_part,
    source_size,
    tee,
    write_part,
)
from dflash.storage.location import Location, check_key, check_prefix
from dflash.storage.retry import TransferLimits, retry
from dflash.storage.s3_clients import S3Credentials, open_obstore
from dflash.storage.s3_control import S3Control, full_key, quote_etag, unquote_etag
from dflash.storage.s3_failures import classify
from dflash.storage.store import Check, ObjectInfo, Store, Transfer, TransferCounts, UploadInfo

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode

T = TypeVar("T")
Consumer = Callable[[Iterable[bytes], bool], Digest]
_STREAM_BYTES = 1 << 20  # four times as much takes twice the system time: the pages of each chunk are new
_GROUP = 16  # files that lie in part files, and mapped, at a time
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_PLAIN_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _Part:
    """A listed object, the file that it shall be, and the part file that it is until it is checked."""

    info: ObjectInfo
    path: Path
    part: Path


class S3Store(Store):
    """A bucket, or a prefix in it."""

    def __init__(self, location: Location, credentials: S3Credentials, limits: TransferLimits) -> None:
        super().__init__(location.uri)
        self.location = location
        self.credentials = credentials
        self.limits = limits
        self._client = open_obstore(location.bucket, credentials, limits)
        self._control = S3Control(location, credentials, limits, self.counters)

    def __reduce__(self) -> tuple[type[S3Store], tuple[Location, S3Credentials, TransferLimits]]:
        return (S3Store, (self.location, self.credentials, self.limits))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See `Store.list`; two whole listings have to agree, since a page may come back empty without an error."""
        return self._control.list_objects(check_prefix(prefix))

    def list_folders(self) -> tuple[str, ...]:
        """See `Store.list_folders`; asks for the names alone, so that the number of objects doesn't count."""
        return tuple(self._control.list_folders())

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        path = self._path(key)
        meta = self._run(key, lambda: self._client.head(path))
        return ObjectInfo(key, meta["size"], unquote_etag(meta["e_tag"]))

    def read(
        self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None, max_bytes: int | None = None
    ) -> bytes:
        """See `Store.read`."""
        info = expect or self.head(key)
        if max_bytes is not None and info.size > max_bytes:
            raise StorageError(
                f"{self._uri(key)}: has {info.size} bytes, at most {max_bytes} are read into memory here"
            )
        chunks: list[bytes] = []

        def consume(stream: Iterable[bytes], with_md5: bool) -> Digest:
            chunks.clear()
            return digest_chunks(tee(stream, chunks.append), with_md5=with_md5)

        self._run(key, lambda: self._fetch(key, info, sha256, consume))
        return b"".join(chunks)

    def download(
        self, key: str, path: Path, *, expect: ObjectInfo | None = None, sha256: str | None = None
    ) -> Transfer:
        """See `Store.download`."""
        info = expect or self.head(key)

        def fetch_file() -> Transfer:
            part = part_path(path)
            try:
                transfer = self._fetch(key, info, sha256, lambda s, with_md5: write_part(part, s, with_md5=with_md5))
                move_into_place(part, path)
            finally:
                remove_part(part)
            return transfer

        return self._run(key, fetch_file)

    def download_all(self, files: Sequence[tuple[ObjectInfo, Path]]) -> tuple[Transfer, ...]:
        """See `Store.download_all`; the MD5s of a group are taken at once, which costs a third of one after another."""
        groups = (files[start : start + _GROUP] for start in range(0, len(files), _GROUP))
        return tuple(transfer for group in groups for transfer in self._download_group(group))

    def _download_group(self, files: Sequence[tuple[ObjectInfo, Path]]) -> tuple[Transfer, ...]:
        parts = [_Part(info, path, part_path(path)) for info, path in files]
        try:
            transfers = [self._fetch_part(part) for part in parts]
            told = [part for part in parts if _tells_md5(part.info)]
            md5s = dict(zip(told, files_md5([part.part for part in told]), strict=True))
            taken = zip(parts, transfers, strict=True)
            return tuple(self._take_part(part, transfer, md5s.get(part)) for part, transfer in taken)
        finally:
            for part in parts:
                remove_part(part.part)

    def _fetch_part(self, part: _Part) -> Transfer:
        """GET a listed object into its part file; its MD5 is still to be compared."""

        def fetch() -> Transfer:
            remove_part(part.part)  # of a try before
            return self._fetch(part.info.key, part.info, None, lambda s, _: write_part(part.part, s), checks_md5=False)

        return self._run(part.info.key, fetch)

    def _take_part(self, part: _Part, transfer: Transfer, md5: str | None) -> Transfer:
        """Move a part file into place if its MD5 is what the ETag tells, or the ETag tells none; else get it anew."""
        key = part.info.key
        if md5 is not None:
            try:
                check = self._check_md5(key, part.info, Digest(transfer.size, transfer.sha256, md5))
            except IntegrityError:
                self.counters.add(TransferCounts(retries=1))
                return self.download(key, part.path, expect=part.info)
            transfer = replace(transfer, checked_by=check)
        move_into_place(part.part, part.path)
        return transfer

    def verify(self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None) -> Transfer:
        """See `Store.verify`."""
        info = expect or self.head(key)
        return self._run(key, lambda: self._fetch(key, info, sha256, _digest_stream))

    def put_if_absent(self, key: str, source: bytes | Path, *, sha256: str | None = None) -> bool:
        """See `Store.put_if_absent`."""
        size = source_size(source)
        if size > self.limits.multipart_threshold_bytes:
            return self._put_large(key, source, size, sha256)
        data = source if isinstance(source, bytes) else _read_source(source)
        digest = digest_chunks([data])
        check_digest(f"source of {self._uri(key)}", digest, size=size, sha256=sha256)
        try:
            self._put(key, data, "create")
        except PreconditionError:
            self._check_same(key, digest)
            return False
        return True

    def replace(self, key: str, data: bytes, *, if_match: str | None) -> str:
        """See `Store.replace`."""
        mode: PutMode = "create" if if_match is None else {"e_tag": quote_etag(if_match)}
        try:
            etag = self._put(key, data, mode)
        except (PreconditionError, ObjectNotFoundError) as conflict:
            try:
                info = self.head(key)
                is_ours = info.size == len(data) and self.read(key, expect=info) == data
            except ObjectNotFoundError:
                is_ours = False
            if not is_ours or info.etag is None:
                expected = "no object" if if_match is None else f"ETag {if_match}"
                raise PreconditionError(
                    f"{self._uri(key)}: expected {expected}, found another; read it again and decide anew"
                ) from conflict
            return info.etag
        return etag

    def copy(
        self, source_key: str, target_store: Store, target_key: str, *, size: int, sha256: str | None = None
    ) -> Transfer:
        """See `Store.copy`; by the server itself where both ends are one server and one set of credentials."""
        if isinstance(target_store, S3Store) and target_store.credentials == self.credentials:
            source = self.head(source_key)
            if source.size != size:
                raise IntegrityError(f"{self._uri(source_key)}: expected {size} bytes, found {source.size}")
            copied = self._control.copy(source, target_store.location, check_key(target_key), sha256)
            if sha256 is not None and copied.checked_by == "size":
                # The server told nothing about the copy's content, so its bytes have to.
                return target_store.verify(target_key, expect=ObjectInfo(target_key, size, copied.etag), sha256=sha256)
            return copied
        with tempfile.TemporaryDirectory(prefix="dflash-copy-") as folder:
            path = Path(folder) / "object"
            transfer = self.download(source_key, path, sha256=sha256)
            check_digest(self._uri(source_key), Digest(transfer.size, transfer.sha256), size=size, sha256=sha256)
            target_store.put_if_absent(target_key, path, sha256=transfer.sha256)
        return transfer

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        paths = [self._path(key) for key in keys]
        if paths:
            self._run(keys[0], lambda: self._client.delete(paths))

    def list_uploads(self, prefix: str = "") -> tuple[UploadInfo, ...]:
        """See `Store.list_uploads`."""
        return self._control.list_uploads(check_prefix(prefix))

    def abort_upload(self, upload: UploadInfo) -> None:
        """See `Store.abort_upload`."""
        self._control.abort_upload(check_key(upload.key), upload.upload_id)

    def identify(self, info: ObjectInfo) -> str:
        """See `Store.identify`."""
        etag = info.etag or self.head(info.key).etag
        return f"etag:{etag}"

    def probe_conditional_writes(self) -> None:
        """See `Store.probe_conditional_writes`."""
        key = f".dflash-probe/{uuid.uuid4().hex}"
        try:
            first = self._put(key, b"first", "create")
            self._expect_refusal(key, "create", "If-None-Match")
            self._expect_refusal(key, {"e_tag": '"0123456789abcdef0123456789abcdef"'}, "If-Match")
            self.replace(key, b"third", if_match=first)
        except BaseException:
            with suppress(StorageError):  # what the probe found is the news
                self.delete([key])
            raise
        self.delete([key])

    def _expect_refusal(self, key: str, mode: PutMode, header: str) -> None:
        try:
            self._put(key, b"second", mode)
        except PreconditionError:
            return
        raise ConditionalWriteError(
            f"{self.uri}: the server does not enforce {header}, so two writers could undo each other; nothing is "
            "published there. Use a server with conditional writes (AWS S3, SeaweedFS, MinIO) or a local folder"
        )

    def _put(self, key: str, data: bytes, mode: PutMode) -> str:
        path = self._path(key)
        result = self._run(key, lambda: self._client.put(path, data, mode=mode, use_multipart=False))
        self.counters.add(TransferCounts(bytes_up=len(data)))
        etag = unquote_etag(result["e_tag"])
        if etag is None:
            raise ConditionalWriteError(f"{self._uri(key)}: the server gave no ETag, so no write can be guarded")
        return etag

    def _put_large(self, key: str, source: bytes | Path, size: int, sha256: str | None) -> bool:
        fits = size <= self.limits.single_put_max_bytes
        if fits and isinstance(source, Path) and sha256 is not None and _SHA256.fullmatch(sha256):
            digest = Digest(size, sha256.lower())
            return self._put_unless_there(key, digest, lambda: self._put_file(key, source, digest))
        digest = digest_chunks([source] if isinstance(source, bytes) else file_chunks(source))
        check_digest(f"source of {self._uri(key)}", digest, size=size, sha256=sha256)
        return self._put_unless_there(key, digest, lambda: self._control.upload(check_key(key), source, size))

    def _put_unless_there(self, key: str, digest: Digest, put: Callable[[], bool]) -> bool:
        try:
            # Reading gigabytes back for every shard of a rerun would cost more than the upload: size only.
            self._check_size(self.head(key), digest.size)
        except ObjectNotFoundError:
            if put():
                return True
            self._check_same(key, digest)
        return False

    def _put_file(self, key: str, path: Path, digest: Digest) -> bool:
        """Leave the comparison with the digest to the server; to the bytes read back where it doesn't tell of one."""
        checked_by = self._control.put_file(check_key(key), path, digest)
        if checked_by == "size":
            try:
                self.verify(key, sha256=digest.sha256)
            except IntegrityError:
                # Ours, of a moment ago, and proven to be damaged: a rerun would take its size for proof.
                with suppress(StorageError):
                    self.delete([key])
                raise
        return checked_by is not None

    def _check_same(self, key: str, digest: Digest) -> None:
        """Read back what has the key: another object there must never pass as stored."""
        info = self.head(key)
        self._check_size(info, digest.size)
        found = self.verify(key, expect=info)
        if found.sha256 != digest.sha256:
            raise IntegrityError(
                f"{self._uri(key)}: is there already with other content (sha256 {found.sha256}; {digest.sha256} was to "
                "be stored): remove it or take another key"
            )

    def _check_size(self, info: ObjectInfo, size: int) -> None:
        if info.size != size:
            raise IntegrityError(
                f"{self._uri(info.key)}: is there already with {info.size} bytes, {size} were to be stored; "
                "it was written by something else: remove it or take another key"
            )

    def _fetch(
        self, key: str, info: ObjectInfo, sha256: str | None, consume: Consumer, *, checks_md5: bool = True
    ) -> Transfer:
        """GET the version that was listed and compare it with what is known of it."""
        options: GetOptions = {} if info.etag is None else {"if_match": quote_etag(info.etag)}
        with_md5 = checks_md5 and sha256 is None and _tells_md5(info)
        stream = self._client.get(self._path(key), options=options).stream(min_chunk_size=_STREAM_BYTES)
        digest = consume(stream, with_md5)
        self.counters.add(TransferCounts(bytes_down=digest.size))
        check_digest(self._uri(key), digest, size=info.size, sha256=sha256)
        check: Check = "size" if sha256 is None else "sha256"
        if with_md5:
            check = self._check_md5(key, info, digest)
        return Transfer(digest.size, digest.sha256, info.etag, check)

    def _check_md5(self, key: str, info: ObjectInfo, digest: Digest) -> Check:
        if digest.md5 == info.etag:
            return "etag"
        # Under KMS the ETag looks like an MD5 and is none.
        if self._control.is_encrypted_by_key(key):
            return "size"
        raise IntegrityError(
            f"{self._uri(key)}: expected MD5 {info.etag} (its ETag), found {digest.md5} over {digest.size} bytes; "
            "the content is damaged"
        )

    def _run(self, key: str, operation: Callable[[], T]) -> T:
        uri = self._uri(key)

        def counted() -> T:
            self.counters.add(TransferCounts(requests=1))
            return operation()

        return retry(
            counted,
            lambda error: classify(error, uri, self.location.bucket),
            self.limits,
            lambda: self.counters.add(TransferCounts(retries=1)),
        )

    def _path(self, key: str) -> str:
        return full_key(self.location, check_key(key))

    def _uri(self, key: str) -> str:
        return f"{self.uri}/{key}"


def _tells_md5(info: ObjectInfo) -> bool:
    return info.etag is not None and _PLAIN_MD5.fullmatch(info.etag) is not None


def _read_source(path: Path) -> bytes:
    with os_errors_as_storage_errors(f"source {path}"):
        return path.read_bytes()


def _digest_stream(stream: Iterable[bytes], with_md5: bool) -> Digest:
    return digest_chunks(stream, with_md5=with_md5)
