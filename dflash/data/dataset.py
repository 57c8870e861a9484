"""A dataset root: pointer, manifests, shards, and the metadata root beside it.

Publishing is optimistic, like a commit in a table format: read the pointer, build a manifest on it, put everything
immutable in place, then replace the pointer on the condition that it is still the one that was read. A crash between
any two steps leaves the old version; the loser of a race gets an error that says which version won.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from dflash.data.saved_format import NO_FEATURES, dataset_info, datasets_state
from dflash.errors import (
    DatasetError,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionError,
    PublishConflictError,
    StorageError,
    UsageError,
)
from dflash.manifest import Manifest, PointerMove, PointerRecord, ShardEntry, ShardReceipt, canonical_json, sha256_hex
from dflash.storage import ObjectInfo, S3Credentials, Store, open_store
from dflash.storage.files import file_sha256

POINTER_KEY = "state.json"
INFO_KEY = "dataset_info.json"
REQUESTS_AT_ONCE = 16
READ_ATTEMPTS = 5
Action = Literal["publish", "rollback", "restore", "adopt"]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer as it was read: its record and the ETag that a replacement must match."""

    record: PointerRecord
    etag: str


class DatasetRoot:
    """One dataset on a store.

    Attributes:
        uri: the root; `load_from_disk` opens it.
        store: objects below the root.
        meta: objects below `<root>.meta`.
        cache: local folder for shards and indexes that have to be read from S3.
    """

    def __init__(self, uri: str, store: Store, meta: Store, cache: Path) -> None:
        self.uri = uri
        self.store = store
        self.meta = meta
        self.cache = cache

    @classmethod
    def open(cls, uri: str, credentials: S3Credentials | None = None, cache: Path | None = None) -> DatasetRoot:
        """Open a root that may not exist yet.

        Raises:
            UsageError: `uri` is no local path or `s3://` URI.
        """
        root = uri.rstrip("/")
        if not root:
            raise UsageError("The dataset URI is empty. Expected a local folder or s3://bucket/prefix.")
        return cls(
            root,
            open_store(root, credentials),
            open_store(root + ".meta", credentials),
            cache or Path(".dflash") / "cache",
        )

    def pointer(self) -> Pointer | None:
        """Read the pointer; None when nothing was published yet.

        Raises:
            DatasetError: there is a `state.json` that is not ours or is damaged.
        """
        try:
            info, data = self._read_pinned(POINTER_KEY)
        except ObjectNotFoundError:
            return None
        where = f"{self.uri}/{POINTER_KEY}"
        try:
            state = json.loads(data)
            record_data = canonical_json(state["dflash"]) if isinstance(state, dict) and "dflash" in state else b""
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{where} is not JSON: {error}. Restore it with `dflash restore`.") from error
        if not record_data:
            raise DatasetError(
                f"{where} was written by another program: the entry 'dflash' is missing. "
                "A folder made by save_to_disk becomes version 1 with `dflash adopt`."
            )
        record = PointerRecord.from_bytes(record_data, where)
        if info.etag is None:
            raise DatasetError(f"{where}: the store gives no ETag, so the pointer can't be replaced safely.")
        return Pointer(record, info.etag)

    def _read_pinned(self, key: str) -> tuple[ObjectInfo, bytes]:
        """Content and ETag that belong together, although the object may be replaced between the two requests."""
        for _ in range(READ_ATTEMPTS):
            info = self.store.head(key)
            try:
                return info, self.store.read(key, expect=info)
            except PreconditionError:
                continue
        raise StorageError(f"{self.uri}/{key} was replaced {READ_ATTEMPTS} times while it was read. Run again.")

    def current(self) -> Manifest | None:
        """The manifest that the pointer names; None when nothing was published yet."""
        pointer = self.pointer()
        return None if pointer is None else self.manifest_of(pointer.record)

    def manifest_of(self, record: PointerRecord) -> Manifest:
        """The manifest of a pointer, checked against the digest in it."""
        return self._read_manifest(record.manifest, record.manifest_sha256)

    def manifest(self, version: int | str | None = None) -> Manifest:
        """A published version by number or name; the current one for None.

        Raises:
            DatasetError: nothing was published, or no published version has this number; lists those there are.
        """
        pointer = self.pointer()
        if pointer is None:
            raise DatasetError(f"{self.uri} holds no published version. Publish one with `dflash tokenize`.")
        if version is None:
            return self.manifest_of(pointer.record)
        for move in reversed(pointer.record.history):
            if version in (move.version, str(move.version), move.manifest):
                return self._read_manifest(move.manifest)
        known = sorted({move.version for move in pointer.record.history})
        raise DatasetError(f"{self.uri} has no version {version}. Published versions: {known}.")

    def _read_manifest(self, name: str, sha256: str | None = None) -> Manifest:
        key = f"manifests/{name}.json"
        manifest = Manifest.from_bytes(self.store.read(key, sha256=sha256), f"{self.uri}/{key}")
        if manifest.name != name:
            raise DatasetError(
                f"{self.uri}/{key} was altered: its content gives the name {manifest.name}. Restore it from a backup."
            )
        return manifest

    def fetch_shard(self, entry: ShardEntry) -> Path:
        """Local path of a shard, downloaded where the root is on S3, compared with its digest each time.

        Rows are copied from it into new shards, whose digests would vouch for damage.

        Raises:
            IntegrityError: it is damaged in the store.
        """
        return self._fetch_whole(self.store, entry.key, entry.sha256)

    def fetch_index(self, entry: ShardEntry) -> Path:
        """Local path of a shard's index, as `fetch_shard` does it: merging and the gate decide by it.

        Raises:
            IntegrityError: it is damaged in the store.
        """
        return self._fetch_whole(self.meta, entry.index_key, entry.index_sha256)

    def _fetch_whole(self, store: Store, key: str, sha256: str) -> Path:
        path = self._fetch(store, key, sha256)
        if store.local_path(key) is None and file_sha256(path) != sha256:
            path.unlink(missing_ok=True)  # the copy alone is damaged
            path = self._fetch(store, key, sha256)
        found = file_sha256(path)
        if found != sha256:
            raise IntegrityError(
                f"{store.uri}/{key} is damaged: expected sha256 {sha256}, found {found}. Restore the version from a "
                "backup with `dflash restore`, or remove the object and tokenize its batch again."
            )
        return path

    def _fetch(self, store: Store, key: str, sha256: str) -> Path:
        local = store.local_path(key)
        if local is not None:
            if not local.is_file():
                raise ObjectNotFoundError(
                    f"{store.uri}/{key} is missing. Restore it from a backup, or tokenize it again."
                )
            return local
        path = self.cache / key
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(key, path, sha256=sha256)
        return path

    def receipts(self, fingerprints: Iterable[str]) -> dict[str, ShardReceipt]:
        """Receipts of those fingerprints whose shard and index are in place, by fingerprint; a damaged one is none.

        Asks for each object instead of listing: a listing of a prefix that another run writes to is never stable.
        """
        found = [receipt for receipt in _in_parallel(self._read_receipt, fingerprints) if receipt is not None]
        missing = {entry.sha256 for entry in self.missing_shards(receipt.shard for receipt in found)}
        return {receipt.shard.fingerprint: receipt for receipt in found if receipt.shard.sha256 not in missing}

    def _read_receipt(self, fingerprint: str) -> ShardReceipt | None:
        key = f"receipts/{fingerprint}.json"
        try:
            receipt = ShardReceipt.from_bytes(self.meta.read(key), f"{self.meta.uri}/{key}")
        except (ObjectNotFoundError, IntegrityError, DatasetError):
            return None
        return receipt if receipt.shard.fingerprint == fingerprint else None

    def missing_shards(self, entries: Iterable[ShardEntry]) -> list[ShardEntry]:
        """Those whose shard or index is not in place with the right size."""
        wanted = list(entries)
        return [
            entry for entry, in_place in zip(wanted, _in_parallel(self._is_stored, wanted), strict=True) if not in_place
        ]

    def _is_stored(self, entry: ShardEntry) -> bool:
        """Whether shard and index are there; a shard without rows is named by no manifest and has no object."""
        try:
            return (not entry.num_rows or self.store.head(entry.key).size == entry.num_bytes) and self.meta.head(
                entry.index_key
            ).size == entry.index_bytes
        except ObjectNotFoundError:
            return False

    def publish(self, manifest: Manifest, expected: Pointer | None, action: Action = "publish") -> Pointer:
        """Make `manifest` current on the condition that the pointer is still `expected`.

        Its shards must be in place. Safe to repeat after a crash at any point.

        Raises:
            DatasetError: a shard that the manifest names is missing.
            PublishConflictError: another publisher replaced the pointer first; says which version won.
        """
        known: set[str] = set()
        if expected is not None and expected.record.history:  # none in a saved dataset that is adopted in place
            known = {entry.sha256 for entry in self.manifest_of(expected.record).shards}
        new = [entry for entry in manifest.shards if entry.sha256 not in known]
        missing = [entry.key for entry in self.missing_shards(new)]
        if missing:
            raise DatasetError(
                f"{manifest.name} can't be published: {len(missing)} of its shards are not in {self.uri}, "
                f"first {missing[0]}. Upload them first."
            )
        self._put_info()
        data = self._put_manifest(manifest)
        now = datetime.now(UTC).replace(microsecond=0)
        history = () if expected is None else expected.record.history
        move = PointerMove(manifest=manifest.name, version=manifest.version, at=now, action=action)
        record = PointerRecord(
            manifest=manifest.name,
            manifest_sha256=sha256_hex(data),
            version=manifest.version,
            history=(*history, move),
        )
        return self._swap(manifest, record, expected)

    def _put_info(self) -> None:
        """Describe the features once; a description without any fits all shards while a folder is adopted in place."""
        try:
            self.store.put_if_absent(INFO_KEY, dataset_info())
        except IntegrityError:
            if self.store.read(INFO_KEY, max_bytes=1 << 20) != NO_FEATURES:
                raise

    def _put_manifest(self, manifest: Manifest) -> bytes:
        """Store the manifest; one that is there under the same name differs in `created_at` alone, and stays."""
        data, name = manifest.to_bytes(), manifest.name
        key = f"manifests/{name}.json"  # both hash the whole manifest each time they are asked for
        try:
            stored = self.store.read(key)
        except ObjectNotFoundError:
            try:
                self.store.put_if_absent(key, data)
            except IntegrityError:  # another run over the same input was faster, a second earlier
                stored = self.store.read(key)
            else:
                return data
        if Manifest.from_bytes(stored, f"{self.uri}/{key}").name != name:
            raise DatasetError(f"{self.uri}/{key} holds another manifest than its name says; restore it.")
        return stored

    def _swap(self, manifest: Manifest, record: PointerRecord, expected: Pointer | None) -> Pointer:
        data = canonical_json(datasets_state(manifest) | {"dflash": record.model_dump(mode="json")})
        try:
            etag = self.store.replace(POINTER_KEY, data, if_match=None if expected is None else expected.etag)
        except PreconditionError as error:
            winner = self.pointer()
            won = "no version" if winner is None else f"{winner.record.manifest} at {winner.record.history[-1].at}"
            read = "no version" if expected is None else expected.record.manifest
            raise PublishConflictError(
                f"{manifest.name} was not published in {self.uri}: another publisher won.\n"
                f"  expected: {read} to be current\n  found:    {won}\nRun it again: it plans on the new version."
            ) from error
        return Pointer(record, etag)


def _in_parallel(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        return list(threads.map(function, items))
