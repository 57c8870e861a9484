"""Batch folders below a folder of completions: which are complete, and which no version of the dataset names.

A folder is one batch. It is complete when it holds an object `_SUCCESS`, or when nothing in it was written for a while.
Batches are taken in the order of their names, so that the rows of a dataset don't depend on when somebody looked: an
open batch holds back those behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dflash.config import RefreshRun
from dflash.data.dataset import DatasetRoot
from dflash.data.plan import SUFFIXES
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
        The batches by name.

    Raises:
        IntegrityError: the store gave no two equal listings, because of a fast writer; look again later.
    """
    folders: dict[str, list[ObjectInfo]] = defaultdict(list)
    for item in completions.list(""):
        name, separator, key = item.key.partition("/")
        if separator:
            folders[name].append(ObjectInfo(key, item.size, item.etag, item.modified_s))
    merged = merged_batches(root)
    return [
        _classify(name, objects, merged.get(parse_uri(join_uri(completions.uri, name)).uri), run, now_s)
        for name, objects in sorted(folders.items())
    ]


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
    """The batches of all versions that were ever published, by normal URI of their source."""
    pointer = root.pointer()
    names = {} if pointer is None else dict.fromkeys(move.manifest for move in pointer.record.history)
    return {parse_uri(batch.source).uri: batch for name in names for batch in root.manifest(name).batches}


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
