"""Operations on datasets that are killed at every write: what is there before, and what is done.

Imported by the processes that are to be killed, so it brings in little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dflash.data.backup import backup_version, open_mirror, rollback
from dflash.data.collect import CollectRules, collect_garbage
from dflash.data.dataset import DatasetRoot
from dflash.data.restore import restore_version
from dflash.storage import S3Credentials, Store
from tests.data.small_roots import Small, open_root
from tests.storage.faults import FaultPlan, FaultStore, T


class Killed(BaseException):
    """Stands for SIGKILL within the process of the test: nothing catches it."""


@dataclass(slots=True)
class Death(FaultPlan):
    """A plan after whose fault no write reaches the stores any more, from whatever thread."""

    is_dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, call: str, operation: Callable[[], T]) -> T:
        """Run one mutating call with its fault."""
        with self.lock:
            self.calls.append(call)
            is_due = len(self.calls) == self.at
            self._die(now=is_due and self.when == "before")
        result = operation()
        with self.lock:
            self._die(now=is_due and self.when == "after")
        return result

    def _die(self, *, now: bool) -> None:
        self.is_dead |= now
        if self.is_dead:
            raise Killed


@dataclass(frozen=True, slots=True)
class Place:
    """A dataset, its mirror and its working folder; `uri` is the parent of all on S3, `work` a local folder."""

    uri: str
    work: Path
    credentials: S3Credentials | None = None
    opened: list[DatasetRoot] = field(default_factory=list, compare=False)

    def __reduce__(self) -> tuple[type[Place], tuple[str, Path, S3Credentials | None]]:
        return (Place, (self.uri, self.work, self.credentials))

    def open(self, plan: FaultPlan | None = None, kind: type[FaultStore] = FaultStore) -> tuple[Small, DatasetRoot]:
        """The root and the mirror, which strike as planned; clients are made once, since that takes half a second."""
        if not self.opened:
            root = open_root(f"{self.uri}/train", self.work, self.credentials)
            self.opened.extend((root, open_mirror(root, None, self.credentials)))

        def wrap(store: Store) -> Store:
            return store if plan is None else kind(store, plan)

        root, mirror = (DatasetRoot(it.uri, wrap(it.store), wrap(it.meta), it.cache) for it in self.opened)
        return Small(root, self.work), mirror

    def empty(self) -> None:
        """Delete every object."""
        for root in self.opened:
            for store in (root.store, root.meta):
                store.delete([info.key for info in store.list()])


def nothing(_small: Small, _mirror: DatasetRoot) -> None:
    """No dataset yet."""


def one_version(small: Small, _mirror: DatasetRoot) -> None:
    small.merge(0)


def two_versions(small: Small, mirror: DatasetRoot) -> None:
    backup_version(small.root, small.merge(0, 10), mirror)
    backup_version(small.root, small.drop_first_shard(), mirror)


def damaged(small: Small, mirror: DatasetRoot) -> None:
    """A root without pointer, of which one shard is cut, one object lost, one manifest damaged."""
    two_versions(small, mirror)
    first, second = small.root.manifest(1), small.root.manifest(2)
    for key in (second.shards[0].key, first.key):
        small.root.store.replace(key, b"damaged", if_match=small.root.store.head(key).etag)
    small.root.meta.delete([second.shards[0].index_key])
    small.root.store.delete(["state.json"])


def moved_out(small: Small, mirror: DatasetRoot) -> None:
    two_versions(small, mirror)
    collect(small, mirror)


def littered(small: Small, _mirror: DatasetRoot) -> None:
    """Two versions, of which none is backed up, and an orphan of every kind."""
    first = small.merge(0, 10)
    small.drop_first_shard()
    small.put_shard(90)
    orphan = first.model_copy(update={"version": 7, "parent": first.name})
    small.root.store.put_if_absent(orphan.key, orphan.to_bytes())


def publish_first(small: Small, _mirror: DatasetRoot) -> None:
    small.merge(0, 10)


def merge(small: Small, mirror: DatasetRoot) -> None:
    """Replaces a row of the first shard, so that it is written anew."""
    small.merge(2, before_publish=lambda current: backup_version(small.root, current, mirror), duplicates="keep_new")


def back_up(small: Small, mirror: DatasetRoot) -> None:
    backup_version(small.root, small.root.manifest(), mirror)


def restore(small: Small, mirror: DatasetRoot) -> None:
    restore_version(mirror, small.root)


def roll_back(small: Small, mirror: DatasetRoot) -> None:
    rollback(small.root, 1, mirror)


def collect(small: Small, mirror: DatasetRoot) -> None:
    collect_garbage(small.root, mirror, CollectRules(min_age_hours=0))


Step = Callable[[Small, DatasetRoot], None]
# name: what is there, what is done, the version number that is current before and after (0: none that loads).
CASES: dict[str, tuple[Step, Step, int, int]] = {
    "first publish": (nothing, publish_first, 0, 1),
    "merge with backup": (one_version, merge, 1, 2),
    "backup": (one_version, back_up, 1, 1),
    "restore": (damaged, restore, 0, 2),
    "rollback": (moved_out, roll_back, 2, 1),
    "gc": (littered, collect, 2, 2),
}


def act(case: str, place: Place, plan: FaultPlan | None = None) -> None:
    """Do what the case does; the target of a process that is to be killed."""
    CASES[case][1](*place.open(plan))
