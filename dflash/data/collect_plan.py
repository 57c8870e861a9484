"""Decide what garbage collection may take away; changes nothing but a scratch object that tells the store's time."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dflash.data.dataset import REQUESTS_AT_ONCE, DatasetRoot, Pointer
from dflash.errors import DatasetError, ObjectNotFoundError, UsageError
from dflash.manifest import Manifest, PointerMove, ShardEntry, ShardReceipt
from dflash.storage import ObjectInfo, Store, UploadInfo

TRASH: Final = "trash"
SEEN_UPLOADS: Final = f"{TRASH}/uploads"
CLOCK: Final = "clock"
PROBES: Final = (".dflash-probe/", "dflash-probe-")
Place = Literal["root", "meta", "backup", "backup-meta"]


@dataclass(frozen=True, slots=True)
class CollectRules:
    """What stays.

    Attributes:
        keep: versions whose shards stay in place, the current one included: those that were current last.
        min_age_hours: what is younger stays, whatever it is; longer than any run and any reader of an old version.
    """

    keep: int = 1
    min_age_hours: float = 24.0

    def __post_init__(self) -> None:
        if self.keep < 1 or not self.min_age_hours >= 0:
            raise UsageError(
                f"keep={self.keep}, min_age_hours={self.min_age_hours}: expected at least 1 version and at least 0 h."
            )

    @property
    def min_age_s(self) -> float:
        """The age in seconds."""
        return self.min_age_hours * 3600


@dataclass(frozen=True, slots=True)
class Leftover:
    """An object that goes: where it lies, its size, why; `to_trash` if a publisher might still be about to name it."""

    place: Place
    key: str
    num_bytes: int
    reason: str
    to_trash: bool = True

    @property
    def trash_key(self) -> str:
        """Where it is kept until it is old there too; a key below the metadata root."""
        return f"{TRASH}/{self.place}/{self.key}"


@dataclass(frozen=True, slots=True)
class CollectPlan:
    """What a collection will do.

    Attributes:
        pointer: the pointer that was planned on.
        kept: versions whose shards stay in place.
        moved: shards that move to the mirror, since only replaced versions name them.
        backed_up: versions that lose shards and that the mirror doesn't know yet: backed up whole before that, and
            the current one after them.
        leftovers: objects that go, in the order of their places and keys.
        aborted: unfinished uploads that an earlier run saw long ago.
        noticed: unfinished uploads seen for the first time or not long ago; a later run aborts them.
    """

    dataset: str
    pointer: Pointer
    kept: tuple[str, ...]
    moved: tuple[ShardEntry, ...]
    backed_up: tuple[str, ...]
    leftovers: tuple[Leftover, ...]
    aborted: tuple[tuple[Place, UploadInfo], ...]
    noticed: tuple[tuple[Place, UploadInfo], ...]

    def to_json(self) -> dict[str, Any]:
        """Everything that goes, with sizes and reasons."""
        moved = [
            {"key": entry.key, "num_bytes": entry.num_bytes, "reason": "only replaced versions name it"}
            for entry in self.moved
        ]
        removed = [
            {"key": f"{item.place}:{item.key}", "num_bytes": item.num_bytes, "reason": item.reason}
            for item in self.leftovers
        ]
        return {
            "dataset": self.dataset,
            "current": self.pointer.record.manifest,
            "kept": list(self.kept),
            "backed_up": list(self.backed_up),
            "moved": moved,
            "moved_bytes": sum(entry.num_bytes for entry in self.moved),
            "removed": removed,
            "removed_bytes": sum(item.num_bytes for item in self.leftovers),
            "uploads_aborted": [f"{place}:{upload.key}" for place, upload in self.aborted],
            "uploads_noticed": [f"{place}:{upload.key}" for place, upload in self.noticed],
        }


def plan_collection(root: DatasetRoot, mirror: DatasetRoot, rules: CollectRules) -> CollectPlan:
    """List what no published version and no backup needs, and what only replaced versions need.

    Raises:
        DatasetError: nothing was published, or a published version or a backup can't be read: what it names is not
            known then, so nothing may go.
    """
    pointer = root.pointer()
    if pointer is None:
        raise DatasetError(
            f"{root.uri} has no pointer, so nothing says what is needed and nothing is removed. If it held versions, "
            "bring them back with `dflash restore`."
        )
    now_s = store_clock(root.meta)
    own = _published(root, pointer)
    backups = _published(mirror, mirror.pointer())
    kept = _kept_versions(pointer.record.history, rules, now_s)
    scan = _Scan(root, rules, now_s, {**backups, **own}, own)
    uploads = _Uploads.look(root, mirror, scan)
    moved = scan.replaced([own[name] for name in kept])
    return CollectPlan(
        dataset=root.uri,
        pointer=pointer,
        kept=kept,
        moved=moved,
        backed_up=tuple(name for name in own if name not in backups and not set(moved).isdisjoint(own[name].shards)),
        leftovers=(*scan.in_root(pointer), *scan.in_meta()),
        aborted=uploads.old,
        noticed=uploads.new,
    )


def store_clock(store: Store) -> float:
    """The store's own time, by what it says about an object that was written just now."""
    key = f"{CLOCK}/{uuid.uuid4().hex}"
    store.put_if_absent(key, b"now")
    try:
        return next(info.modified_s for info in store.list(CLOCK) if info.key == key)
    finally:
        store.delete([key])


def places(root: DatasetRoot, mirror: DatasetRoot) -> dict[Place, Store]:
    """The stores by their names in a plan."""
    return {"root": root.store, "meta": root.meta, "backup": mirror.store, "backup-meta": mirror.meta}


def _published(place: DatasetRoot, pointer: Pointer | None) -> dict[str, Manifest]:
    names = dict.fromkeys(move.manifest for move in pointer.record.history) if pointer is not None else {}
    return {name: place.manifest(name) for name in names}


def _kept_versions(history: Iterable[PointerMove], rules: CollectRules, now_s: float) -> tuple[str, ...]:
    """Versions that were current last, and those that were current not long ago: readers may have them open."""
    moves = list(history)
    last = list(dict.fromkeys(move.manifest for move in reversed(moves)))
    kept = dict.fromkeys(last[: rules.keep])
    for move, following in itertools.pairwise(moves):
        if now_s - following.at.timestamp() < rules.min_age_s:
            kept[move.manifest] = None
    return tuple(kept)


@dataclass(slots=True)
class _Scan:
    """Compares what lies in the root and beside it with what versions name."""

    root: DatasetRoot
    rules: CollectRules
    now_s: float
    versions: dict[str, Manifest]
    own: dict[str, Manifest]
    named: set[str] = field(init=False)
    running: set[str] = field(default_factory=set, init=False)
    fingerprints: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.named = {f"manifests/{name}.json" for name in self.versions}
        for manifest in self.versions.values():
            self.named |= {key for entry in manifest.shards for key in (entry.key, entry.index_key)}
            self.named |= {f"rejects/{sha256}.jsonl" for batch in manifest.batches for sha256 in batch.rejects}
        self.fingerprints = {entry.fingerprint for version in self.versions.values() for entry in version.shards}
        self._protect_running()

    def is_old(self, info: ObjectInfo) -> bool:
        """Whether an object is older than the rules ask; never where its age isn't known."""
        return info.modified_s > 0 and self.now_s - info.modified_s >= self.rules.min_age_s

    def replaced(self, kept: Iterable[Manifest]) -> tuple[ShardEntry, ...]:
        """Shards in the root that published versions name, and none that is kept."""
        needed = {entry.sha256 for manifest in kept for entry in manifest.shards}
        stored = {info.key for info in self.root.store.list("shards") if self.is_old(info)} - self.running
        entries = {entry.sha256: entry for manifest in self.versions.values() for entry in manifest.shards}
        return tuple(entry for name, entry in entries.items() if name not in needed and entry.key in stored)

    def in_root(self, pointer: Pointer) -> Iterator[Leftover]:
        """Old objects of the root that nothing names. Objects that aren't of our making are left alone."""
        adopted, needed = self._adopted_files(pointer), self.named | self.running
        for info in self.root.store.list():
            if not self.is_old(info) or info.key in needed:
                continue
            if info.key.startswith("shards/"):
                yield Leftover("root", info.key, info.size, "no version and no backup names this shard")
            elif info.key.startswith("manifests/"):
                yield Leftover("root", info.key, info.size, "this manifest was never published")
            elif adopted.get(info.key) == info.size:
                yield Leftover("root", info.key, info.size, "a file of the adopted dataset, replaced by its shards")
            elif info.key.startswith(PROBES):
                yield Leftover("root", info.key, info.size, "left by a probe that was killed", to_trash=False)

    def in_meta(self) -> Iterator[Leftover]:
        """Old objects beside the root that nothing names; reports stay, of refused batches too."""
        needed = self.named | self.running
        for info in self.root.meta.list():
            folder, _, name = info.key.partition("/")
            if not self.is_old(info) or info.key in needed:
                continue
            if folder in {"index", "rejects"}:
                yield Leftover("meta", info.key, info.size, "no version and no backup names it")
            elif folder == "receipts" and name.removesuffix(".json") not in self.fingerprints:
                yield Leftover("meta", info.key, info.size, "no version holds its shard", to_trash=False)
            elif folder in {TRASH, CLOCK}:
                yield Leftover("meta", info.key, info.size, "thrown away by an earlier run", to_trash=False)

    def _protect_running(self) -> None:
        """What receipts of young runs speak of is needed, however old it is."""
        young = [info.key for info in self.root.meta.list("receipts") if not self.is_old(info)]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
            for receipt in threads.map(self._read_receipt, young):
                if receipt is not None:
                    self.named |= {
                        receipt.shard.key,
                        receipt.shard.index_key,
                        f"rejects/{receipt.rejects_sha256}.jsonl",
                    }

    def _read_receipt(self, key: str) -> ShardReceipt | None:
        try:
            return ShardReceipt.from_bytes(self.root.meta.read(key), f"{self.root.meta.uri}/{key}")
        except ObjectNotFoundError:
            return None

    def _adopted_files(self, pointer: Pointer) -> dict[str, int]:
        """Files of a dataset that was adopted in place, by key with their size, once its readers are gone."""
        if self.now_s - pointer.record.history[0].at.timestamp() < self.rules.min_age_s:
            return {}
        here = self.root.store.uri.rstrip("/")
        batches = [batch for manifest in self.own.values() for batch in manifest.batches]
        return {item.key: item.size for batch in batches if batch.source.rstrip("/") == here for item in batch.inputs}


@dataclass(frozen=True, slots=True)
class _Uploads:
    """Unfinished uploads: those that a run long ago saw already, and the others.

    Uploads don't say when they began, so each run notes what it sees; the note's own age, by the store's clock, counts.
    """

    old: tuple[tuple[Place, UploadInfo], ...]
    new: tuple[tuple[Place, UploadInfo], ...]

    @classmethod
    def look(cls, root: DatasetRoot, mirror: DatasetRoot, scan: _Scan) -> _Uploads:
        seen: set[tuple[str, str, str]] = set()
        for info in root.meta.list(SEEN_UPLOADS):
            if scan.is_old(info):
                seen |= {(place, key, name) for place, key, name in json.loads(root.meta.read(info.key))}
        found = [(place, upload) for place, store in places(root, mirror).items() for upload in store.list_uploads()]
        old = [(place, upload) for place, upload in found if (place, upload.key, upload.upload_id) in seen]
        return cls(tuple(old), tuple(item for item in found if item not in old))
