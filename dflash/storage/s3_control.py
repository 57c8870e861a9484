"""What obstore can't do on S3: complete listings, large uploads, copies by the server, unfinished uploads."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dflash.errors import IntegrityError, ObjectNotFoundError, PreconditionError, StorageError
from dflash.storage.files import Digest, check_digest, digest_chunks, file_chunks, os_errors_as_storage_errors
from dflash.storage.location import Location, check_key
from dflash.storage.retry import TransferLimits, retry
from dflash.storage.s3_clients import S3Credentials, open_botocore
from dflash.storage.s3_failures import DIGEST_REFUSALS, classify
from dflash.storage.s3_multipart import MultipartUpload, copy_in_parts, upload_in_parts
from dflash.storage.store import Check, ObjectInfo, Transfer, TransferCounters, TransferCounts, UploadInfo

T = TypeVar("T")

# Streamed PUTs at a time in this process. The embedded server lets 64 MB of uploads in, or one, and closes those that
# have waited for some seconds; of eight of 700 MB three failed in all their tries.
_streamed_puts = threading.BoundedSemaphore(4)


class S3Control:
    """The botocore side of an S3 store. Keys are relative to the store's prefix, as everywhere."""

    def __init__(
        self, location: Location, credentials: S3Credentials, limits: TransferLimits, counters: TransferCounters
    ) -> None:
        self._location = location
        self._credentials = credentials
        self._limits = limits
        self._counters = counters
        self._lock = threading.Lock()
        self._opened: dict[float, Any] = {}

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """List a folder prefix until two whole passes agree.

        A page that arrives empty with status 200 ends a pass early without any error. The passes cut pages at different
        keys, so that one bad page in a cache is not met twice at one place.

        Raises:
            IntegrityError: no two passes agreed.
        """
        return self._agreed(prefix, lambda page_keys: self._list_once(prefix, page_keys))

    def list_folders(self) -> list[str]:
        """List the names of the folders right below the store's prefix, as `list_objects` does.

        Raises:
            IntegrityError: no two passes agreed.
        """
        return self._agreed("", self._list_folders_once)

    def _agreed(self, prefix: str, list_once: Callable[[int], list[T]]) -> list[T]:
        page_keys = self._limits.list_page_keys

        def list_twice() -> list[T]:
            first, second = list_once(page_keys), list_once(page_keys - 1)
            if first != second:
                raise IntegrityError(
                    f"{self._uri(prefix)}: two listings differ ({len(first)} and {len(second)} keys); either pages are "
                    "lost on the way or objects are being written right now: list again when writers are done"
                )
            return first

        return self._run(prefix, list_twice)

    def is_encrypted_by_key(self, key: str) -> bool:
        """Tell whether an object is encrypted with KMS or a customer's key, whose ETags are no MD5."""
        reply = self._run(key, lambda: self._client().head_object(**self._target(key)))
        return _is_encrypted_by_key(reply)

    def upload(self, key: str, source: bytes | Path, size: int) -> bool:
        """Upload in parts; return False where another object got the key first (its content is to be compared).

        The same is returned when the server lost the reply to the last request.
        """
        upload = self._begin(self._target(key), key, checksum="SHA256")
        try:
            upload_in_parts(upload, source, size, self._limits.part_bytes)
            self._counters.add(TransferCounts(bytes_up=size))
            upload.complete(if_none_match=True)
        except BaseException as error:
            upload.abort()
            if isinstance(error, PreconditionError | ObjectNotFoundError):
                return False
            raise
        return True

    def put_file(self, key: str, path: Path, digest: Digest) -> Check | None:
        """Send a file in one conditional request, whose SHA-256 the server compares before it stores anything.

        Returns:
            By what the content was checked, `size` where the server told nothing; None where the key was taken.

        Raises:
            IntegrityError: the file has another digest.
        """
        checksum = base64.b64encode(bytes.fromhex(digest.sha256)).decode()
        client = self._slow_client()

        def send() -> Check | Digest:
            with os_errors_as_storage_errors(f"source {path}"):
                body = path.open("rb")
            with _streamed_puts, body:
                try:
                    reply = client.put_object(**self._target(key), Body=body, ChecksumSHA256=checksum, IfNoneMatch="*")
                except client.exceptions.ClientError as error:
                    if error.response.get("Error", {}).get("Code") not in DIGEST_REFUSALS:
                        raise
                    found = _digest_source(path)
                    if found == digest:  # damaged on the way: again
                        raise
                    return found
            return "sha256" if reply.get("ChecksumSHA256") == checksum else "size"

        try:
            outcome = self._run(key, send)
        except PreconditionError:
            return None
        if isinstance(outcome, Digest):
            check_digest(f"source of {self._uri(key)}", outcome, size=digest.size, sha256=digest.sha256)
            raise StorageError(f"{path} changed while it was sent to {self._uri(key)}: run again")
        self._counters.add(TransferCounts(bytes_up=digest.size))
        return outcome

    def copy(self, source: ObjectInfo, target: Location, target_key: str, sha256: str | None) -> Transfer:
        """Copy on the server, pinned to the version that was looked at; a whole copy that is there already is kept."""
        wanted = {"Bucket": target.bucket, "Key": full_key(target, target_key)}
        found = self._find(wanted, target_key)
        if found is None:
            self._copy_to(wanted, source)
            self._counters.add(TransferCounts(bytes_copied=source.size))
            found = self._find(wanted, target_key)
        uri = f"{target.uri}/{target_key}"
        if found is None or found["ContentLength"] != source.size:
            size = None if found is None else found["ContentLength"]
            raise IntegrityError(f"{uri}: expected a copy of {source.size} bytes, found {size}")
        return Transfer(source.size, "", unquote_etag(found["ETag"]), _check_copy(uri, source, found, sha256))

    def list_uploads(self, prefix: str) -> tuple[UploadInfo, ...]:
        """List unfinished multipart uploads."""
        folder = self._folder(prefix)

        def collect() -> tuple[UploadInfo, ...]:
            uploads: list[UploadInfo] = []
            paginator = self._client().get_paginator("list_multipart_uploads")
            for page in paginator.paginate(Bucket=self._location.bucket, Prefix=folder):
                found = page.get("Uploads", [])
                uploads += [UploadInfo(self._relative(upload["Key"]), upload["UploadId"]) for upload in found]
            return tuple(sorted(uploads, key=lambda upload: (upload.key, upload.upload_id)))

        return self._run(prefix, collect)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an unfinished multipart upload and free its parts."""
        MultipartUpload(self._slow_client(), self._runner(key), self._target(key), upload_id).abort()

    def _list_once(self, prefix: str, page_keys: int) -> list[ObjectInfo]:
        infos: list[ObjectInfo] = []
        for page in self._pages(prefix, page_keys):
            for entry in page.get("Contents", []):
                if not entry["Key"].endswith("/"):  # a folder marker that consoles make
                    key = check_key(self._relative(entry["Key"]))
                    etag, modified = unquote_etag(entry["ETag"]), entry["LastModified"].timestamp()
                    infos.append(ObjectInfo(key, entry["Size"], etag, modified))
        return sorted(infos, key=lambda info: info.key)

    def _list_folders_once(self, page_keys: int) -> list[str]:
        pages = self._pages("", page_keys, Delimiter="/")
        found = (self._relative(entry["Prefix"]) for page in pages for entry in page.get("CommonPrefixes", []))
        return sorted({name.removesuffix("/") for name in found})

    def _pages(self, prefix: str, page_keys: int, **options: str) -> Iterator[dict[str, Any]]:
        arguments = {"Bucket": self._location.bucket, "Prefix": self._folder(prefix), "MaxKeys": page_keys, **options}
        while True:
            page = self._client().list_objects_v2(**arguments)
            num_found = len(page.get("Contents", [])) + len(page.get("CommonPrefixes", []))
            if "IsTruncated" not in page or page.get("KeyCount", num_found) != num_found:
                raise IntegrityError(f"{self._uri(prefix)}: a page of the listing arrived incomplete")
            yield page
            if not page["IsTruncated"]:
                return
            if not page.get("NextContinuationToken"):
                raise IntegrityError(
                    f"{self._uri(prefix)}: a page of the listing names no next page, yet isn't the last"
                )
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _copy_to(self, wanted: dict[str, str], source: ObjectInfo) -> None:
        origin: dict[str, Any] = {"CopySource": self._target(source.key)}
        if source.etag is not None:
            origin["CopySourceIfMatch"] = quote_etag(source.etag)
        client = self._slow_client()
        if source.size <= self._limits.copy_threshold_bytes:
            self._run(source.key, lambda: client.copy_object(**wanted, **origin, ChecksumAlgorithm="SHA256"))
            return
        upload = self._begin(wanted, source.key, checksum=None)
        try:
            copy_in_parts(upload, origin, source.size, self._limits.copy_part_bytes)
            upload.complete(if_none_match=False)
        except BaseException as error:
            upload.abort()
            # The reply to the last request was lost: the copy is there, or the size check says that it isn't.
            if not isinstance(error, ObjectNotFoundError):
                raise

    def _begin(self, target: dict[str, str], key: str, *, checksum: str | None) -> MultipartUpload:
        options = {} if checksum is None else {"ChecksumAlgorithm": checksum}
        run = self._runner(key)
        reply = run(lambda: self._slow_client().create_multipart_upload(**target, **options))
        return MultipartUpload(self._slow_client(), run, target, reply["UploadId"])

    def _find(self, target: dict[str, str], key: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._run(key, lambda: self._client().head_object(**target, ChecksumMode="ENABLED"))
        except ObjectNotFoundError:
            return None
        return found

    def _runner(self, key: str) -> Callable[[Callable[[], Any]], Any]:
        return lambda operation: self._run(key, operation)

    def _run(self, key: str, operation: Callable[[], T]) -> T:
        uri = self._uri(key)

        def counted() -> T:
            self._counters.add(TransferCounts(requests=1))
            return operation()

        return retry(
            counted,
            lambda error: classify(error, uri, self._location.bucket),
            self._limits,
            lambda: self._counters.add(TransferCounts(retries=1)),
        )

    def _client(self) -> Any:
        return self._open(self._limits.read_timeout_s)

    def _slow_client(self) -> Any:
        """Return the client for what the server answers only when it is done: copies, completions, streamed bodies."""
        return self._open(self._limits.copy_timeout_s)

    def _open(self, read_timeout_s: float) -> Any:
        with self._lock:
            if read_timeout_s not in self._opened:
                client = open_botocore(self._credentials, self._limits, read_timeout_s=read_timeout_s)
                self._opened[read_timeout_s] = client
            return self._opened[read_timeout_s]

    def _target(self, key: str) -> dict[str, str]:
        return {"Bucket": self._location.bucket, "Key": full_key(self._location, key)}

    def _folder(self, prefix: str) -> str:
        parts = [part for part in (self._location.path, prefix) if part]
        return "".join(f"{part}/" for part in parts)

    def _relative(self, path: str) -> str:
        return path[len(self._folder("")) :]

    def _uri(self, key: str) -> str:
        return f"{self._location.uri}/{key}"


def _digest_source(path: Path) -> Digest:
    with os_errors_as_storage_errors(f"source {path}"):
        return digest_chunks(file_chunks(path))


def full_key(location: Location, key: str) -> str:
    """Return the key in the bucket of a key in a store."""
    return f"{location.path}/{key}" if location.path else key


def quote_etag(etag: str) -> str:
    """Return an ETag as HTTP writes it."""
    return etag if etag.startswith("W/") else f'"{etag}"'


def unquote_etag(etag: str | None) -> str | None:
    """Return an ETag without the quotes of HTTP; None where the server gave none."""
    return None if not etag else etag.strip('"') if not etag.startswith("W/") else etag


def _check_copy(uri: str, source: ObjectInfo, found: dict[str, Any], sha256: str | None) -> Check:
    """Compare a copy with its source by the strongest mark that the server gives.

    An equal ETag is taken as such; another one says nothing where either is a count of parts or a key encrypts.
    """
    checksum = found.get("ChecksumSHA256", "")
    if sha256 is not None and checksum and "-" not in checksum:
        if base64.b64decode(checksum).hex() != sha256.lower():
            raise IntegrityError(
                f"{uri}: expected sha256 {sha256}, the server computed {checksum} (base64) for the copy"
            )
        return "sha256"
    etag = unquote_etag(found["ETag"])
    if etag == source.etag:
        return "etag"
    if "-" not in f"{etag}{source.etag}" and not _is_encrypted_by_key(found):
        raise IntegrityError(f"{uri}: expected the content of ETag {source.etag}, found {etag}: other content is there")
    return "size"


def _is_encrypted_by_key(reply: dict[str, Any]) -> bool:
    return "SSECustomerAlgorithm" in reply or str(reply.get("ServerSideEncryption", "")).startswith("aws:kms")
