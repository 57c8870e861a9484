"""Batch folders below a folder of completions: which are complete, and which no version of the dataset names.

A folder is one batch. It is complete when it holds an object `_SUCCESS`, or when nothing in it was written for a while.
Batches are taken in the order of their names, so that the rows of a dataset don't depend on when somebody looked: an
open batch holds back those behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal

from dflash.config import RefreshRun
from dflash.data.dataset import DatasetRoot
from dflash.data.plan import SUFFIXES
from dflash.errors import DflashError, IntegrityError, UsageError
from dflash.manifest import Batch
from dflash.storage import ObjectInfo, Store, join_uri, parse_uri

SUCCESS: Final = "_SUCCESS"
PARTS_PREFIX: Final = "_parts/"  # what `dflash generate` keeps beside its files
BatchState = Literal["merged", "changed", "ready", "open", "empty", "skipped"]


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """One batch folder.

    Attributes:
        name: the folder's name.
        state: `merged`: a version names it. `changed`: likewise, but files came or were replaced since, which are never
            merged by themselves. `ready`: complete and new. `open`: still being written. `empty`: complete without
            any completions. `skipped`: left out on request.
        num_files: completion files.
        num_bytes: of those files, as stored.
        why: what decided the state, for a person.
    """

    name: str
    state: BatchState
    num_files: int
    num_bytes: int
    why: str

    def to_json(self) -> dict[str, Any]:
        """Row of a table."""
        return {
            "batch": self.name,
            "state": self.state,
            "files": self.num_files,
            "bytes": self.num_bytes,
            "why": self.why,
        }


def find_batches(completions: Store, root: DatasetRoot, run: RefreshRun, now_s: float) -> list[FoundBatch]:
    """Look at every batch folder; changes nothing.

    Args:
        completions: the folder that holds the batch folders; objects beside them belong to no batch.
        root: the dataset. A batch counts as merged if any version that was ever published names it, so that one that
            was rolled back doesn't return by itself.
        run: when a batch is complete, and which are left out.
        now_s: seconds since the epoch by the store's clock.

    Returns:
        The batches by name. One whose objects can't be listed, because they are being written, is `open`.

    Raises:
        IntegrityError: the store gave no two equal listings of the folders themselves; look again later.
    """
    merged, found = merged_batches(root), []
    for name in completions.list_folders():
        before = merged.get(parse_uri(join_uri(completions.uri, name)).uri)
        try:
            objects = _objects_of(completions, name)
        except (IntegrityError, UsageError) as error:
            found.append(_unlisted(name, before, run, error))
            continue
        if objects:  # else only a marker of the folder, or it was removed just now
            found.append(_classify(name, objects, before, run, now_s))
    return found


def mergeable(batches: Iterable[FoundBatch]) -> list[FoundBatch]:
    """The new batches that may be merged now, in order: those before the first that is still being written."""
    ready = []
    for batch in batches:
        if batch.state == "open":
            break
        if batch.state == "ready":
            ready.append(batch)
    return ready


def merged_batches(root: DatasetRoot) -> dict[str, Batch]:
    """The batches of all versions that were ever published, by normal URI of their source.

    A version that is published names the batches of the one before it as well. So a version is read only where the
    pointer didn't go on from it by publishing: the newest one, and those that were rolled back. What lies before a
    restore is read whole, since that history may have been put together from backups.
    """
    pointer = root.pointer()
    history = () if pointer is None else pointer.record.history
    restored = max((place for place, move in enumerate(history) if move.action == "restore"), default=-1)
    names = dict.fromkeys(
        move.manifest
        for place, (move, later) in enumerate(zip_longest(history, history[1:]))
        if place <= restored or later is None or later.action != "publish"
    )
    return {parse_uri(batch.source).uri: batch for name in names for batch in root.manifest(name).batches}


def _objects_of(completions: Store, name: str) -> list[ObjectInfo]:
    items = ((item, item.key.removeprefix(f"{name}/")) for item in completions.list(name))
    return [ObjectInfo(key, item.size, item.etag, item.modified_s) for item, key in items]


def _unlisted(name: str, merged: Batch | None, run: RefreshRun, error: DflashError) -> FoundBatch:
    """A batch that nobody can judge now: it isn't merged, and doesn't keep others before it from being merged."""
    state: BatchState = "changed" if merged is not None else "skipped" if name in run.skip else "open"
    return FoundBatch(name, state, 0, 0, f"it can't be listed: {error}")


def _classify(
    name: str, objects: Sequence[ObjectInfo], merged: Batch | None, run: RefreshRun, now_s: float
) -> FoundBatch:
    files = [item for item in objects if item.key.endswith(SUFFIXES)]
    state: BatchState
    if merged is not None:
        state, why = _compare(files, merged)
    elif name in run.skip:
        state, why = "skipped", "left out on request"
    else:
        is_complete, why = _completeness(objects, run.quiet_s, now_s)
        state = "open" if not is_complete else "ready" if files else "empty"
    return FoundBatch(name, state, len(files), sum(item.size for item in files), why)


def _compare(files: Iterable[ObjectInfo], merged: Batch) -> tuple[BatchState, str]:
    known = {(item.key, item.size, item.etag) for item in merged.inputs}
    new = [item.key for item in files if (item.key, item.size, item.etag) not in known]
    if new:
        return "changed", f"{len(new)} files came or were replaced after the merge, first {new[0]}: not merged"
    return "merged", f"{merged.num_rows} rows"


def _completeness(objects: Iterable[ObjectInfo], quiet_s: float | None, now_s: float) -> tuple[bool, str]:
    times = [item.modified_s for item in objects]
    if any(item.key == SUCCESS for item in objects):
        return True, f"{SUCCESS} is there"
    if any(item.key.startswith(PARTS_PREFIX) for item in objects):
        return False, f"no {SUCCESS} yet, which its generation writes at the end, however long it stands still"
    if quiet_s is None:
        return False, f"no {SUCCESS} yet"
    if min(times) <= 0:
        return False, f"no {SUCCESS} yet, and the store doesn't say when objects were written"
    quiet = now_s - max(times)
    return quiet >= quiet_s, f"no {SUCCESS}; last written {quiet:.0f} s ago, complete after {quiet_s:.0f} s"
