"""The contract of a store: what every caller may rely on, whatever holds the bytes.

- Keys are relative to the store's root, `/`-separated and checked (`location.check_key`).
- What is read is whole: its size, and its digest where one travelled separately, are compared before it is returned.
- `replace`, and `put_if_absent` of what doesn't go in parts, are atomic: of any number of writers exactly one wins, and
  readers see the old or the new object, whole. A reply that was lost is told from a conflict by reading back.
- A store pickles by its URI and credentials and is opened anew in the child. Start children with `spawn`: the S3 client
  hangs after a fork.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

Check = Literal["sha256", "etag", "size"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing says about one object.

    Attributes:
        key: relative to the store's root.
        size: bytes.
        etag: the store's version mark without quotes; None where a folder was listed (content was not read).
        modified_s: when it was written, in seconds since the epoch by the store's clock; 0 where that isn't known.
    """

    key: str
    size: int
    etag: str | None = None
    modified_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What was read or copied.

    Attributes:
        size: bytes.
        sha256: hex digest of the bytes that arrived; empty for a server-side copy, whose bytes never came here.
        etag: the version that was read, or that the copy got.
        checked_by: the strongest thing the bytes were compared with: a sha256, the store's own MD5 (in the ETag) or
            only the size (an ETag with a part count says nothing about the content).
    """

    size: int
    sha256: str
    etag: str | None
    checked_by: Check


@dataclass(frozen=True, slots=True)
class UploadInfo:
    """An upload that was begun and never finished: a multipart upload, or a part file in a folder."""

    key: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Bytes and requests of a store since it was opened; copied bytes stayed on the server."""

    bytes_up: int = 0
    bytes_down: int = 0
    bytes_copied: int = 0
    requests: int = 0
    retries: int = 0


class TransferCounters:
    """Thread-safe sums of `TransferCounts`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = TransferCounts()

    def add(self, counts: TransferCounts) -> None:
        """Add counts, for example those that a worker process brought back."""
        with self._lock:
            names = [item.name for item in fields(TransferCounts)]
            self._counts = TransferCounts(*(getattr(self._counts, n) + getattr(counts, n) for n in names))

    def snapshot(self) -> TransferCounts:
        """Return the sums so far."""
        with self._lock:
            return self._counts


class Store(ABC):
    """A bucket prefix or a folder. Methods raise `StorageError` and its subclasses only, `UsageError` for a bad key."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.counters = TransferCounters()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """List all objects under a folder prefix, sorted by key; `a/b` lists `a/b/...` and never `a/bc`.

        A missing prefix or root gives an empty list.

        Raises:
            IntegrityError: no two listings of a server agreed, because of lost pages or a busy writer below the prefix.
        """

    def list_folders(self) -> tuple[str, ...]:
        """List the names of the folders right below the root, sorted; what is written inside them doesn't matter."""
        return tuple(sorted({info.key.partition("/")[0] for info in self.list() if "/" in info.key}))

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size and ETag of one object; ObjectNotFoundError where there is none."""

    @abstractmethod
    def read(
        self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None, max_bytes: int | None = None
    ) -> bytes:
        """Return an object's bytes, pinned and checked as by `download`; more than `max_bytes` is a StorageError."""

    @abstractmethod
    def download(
        self, key: str, path: Path, *, expect: ObjectInfo | None = None, sha256: str | None = None
    ) -> Transfer:
        """Write an object to a local file, which appears whole or not at all.

        Args:
            key: the object.
            path: the file; its folder is made, a file that is there is replaced at the end.
            expect: size and ETag from the listing; None asks for them first.
            sha256: hex digest from a manifest.

        Raises:
            ObjectNotFoundError: no such object.
            PreconditionError: the object was replaced since it was listed.
            IntegrityError: size or digest still differ after all retries.
        """

    def download_all(self, files: Sequence[tuple[ObjectInfo, Path]]) -> tuple[Transfer, ...]:
        """Download listed objects to files, each as `download` does; the first failure ends it.

        Args:
            files: from the listing, with the file for each.

        Returns:
            Of each file, in order.

        Raises:
            As `download`; files that came before may be in place, none is there in part.
        """
        return tuple(self.download(info.key, path, expect=info) for info, path in files)

    @abstractmethod
    def verify(self, key: str, *, expect: ObjectInfo | None = None, sha256: str | None = None) -> Transfer:
        """Read an object through without keeping it, pinned and checked as by `download`."""

    @abstractmethod
    def put_if_absent(self, key: str, source: bytes | Path, *, sha256: str | None = None) -> bool:
        """Store an object that isn't there yet; return False where the same content is there already.

        Objects over `TransferLimits.multipart_threshold_bytes` need keys named after their content: one that is there
        is compared by size alone (a rerun must be cheap), and servers check the condition of a multipart completion
        without being atomic (measured on SeaweedFS: of writers with different content two reported success). A file
        whose digest is given goes in one request up to `single_put_max_bytes`: the server compares it with the digest,
        and where one of its size is there already the file isn't read.

        Args:
            key: the object.
            source: the bytes, or a file of them.
            sha256: hex digest that the source must have.

        Raises:
            IntegrityError: other content has this key, or the source has another digest.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes, *, if_match: str | None) -> str:
        """Replace a small object if its ETag is still `if_match` (None: if it doesn't exist); return the new ETag.

        Finding exactly `data` in place counts as done: it is this call's own write whose reply was lost.

        Raises:
            PreconditionError: another writer was there first.
        """

    @abstractmethod
    def copy(
        self, source_key: str, target_store: Store, target_key: str, *, size: int, sha256: str | None = None
    ) -> Transfer:
        """Copy an immutable object into this or another store, by the server itself where it can; a copy there is kept.

        Args:
            source_key: the object here.
            target_store: where to.
            target_key: the key there.
            size: the size from the manifest, compared with source and copy.
            sha256: the digest from the manifest, compared where bytes or a server-side checksum are at hand.

        Raises:
            IntegrityError: source or copy differ in size or digest, or other content has the target key.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; keys that aren't there are passed over."""

    @abstractmethod
    def list_uploads(self, prefix: str = "") -> tuple[UploadInfo, ...]:
        """List unfinished uploads under a folder prefix, sorted by key."""

    @abstractmethod
    def abort_upload(self, upload: UploadInfo) -> None:
        """Remove an unfinished upload; one that is gone already is passed over."""

    @abstractmethod
    def identify(self, info: ObjectInfo) -> str:
        """Return a mark of a listed object's content, for fingerprints: `etag:...` on S3, `sha256:...` in a folder."""

    def local_path(self, key: str) -> Path | None:  # noqa: ARG002 (only folders have paths)
        """Return where an object lies as a file, for readers that map it; None where it is on a server."""
        return None

    @abstractmethod
    def probe_conditional_writes(self) -> None:
        """Prove with a scratch object that conditional writes are enforced; ConditionalWriteError where they aren't."""
