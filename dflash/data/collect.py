"""Garbage collection: the root keeps what its newest versions need; the rest is moved out or removed.

Every step can be taken back until readers and publishers can't need it any more:

1. Shards that only replaced versions name are copied to the mirror, which gets those versions whole and the current
   one after them; other leftovers are copied into `<root>.meta/trash`.
2. If the pointer is still the one that was planned on, they are deleted from where they lay.
3. The pointer is written anew under a condition (the fence), with the same content: a publisher that looked at the
   shards before step 2 loses the race, plans again, and finds out what is missing. If it was faster, what it names is
   put back.

A crash between 2 and 3 is healed by the next run, which begins by putting back what a published version lacks.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from dflash.data.backup import backup_version
from dflash.data.collect_plan import SEEN_UPLOADS, TRASH, CollectPlan, CollectRules, Place, places, plan_collection
from dflash.data.copying import COPIES_AT_ONCE, Progress, copy_shards, mark_of, silent
from dflash.data.dataset import POINTER_KEY, DatasetRoot, Pointer
from dflash.errors import DamagedDatasetError, PreconditionError, PublishConflictError
from dflash.manifest import canonical_json, sha256_hex

__all__ = ["CollectPlan", "CollectResult", "CollectRules", "collect_garbage", "plan_collection", "put_back"]

FENCE_KEY: Final = "dflash_fence"  # beside our part of the pointer; readers and publishers pass over it
FENCE_ATTEMPTS: Final = 10  # publishers in a row that the fence may lose against


@dataclass(frozen=True, slots=True)
class CollectResult:
    """What a collection did.

    Attributes:
        plan: what it set out to do.
        healed: objects that were put back before planning, since an earlier run was killed.
        put_back: objects that were put back because a publisher was faster.
    """

    plan: CollectPlan
    healed: tuple[str, ...]
    put_back: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For `--json` and artifacts."""
        return {**self.plan.to_json(), "healed": list(self.healed), "put_back": list(self.put_back)}


def collect_garbage(
    root: DatasetRoot, mirror: DatasetRoot, rules: CollectRules, progress: Progress = silent
) -> CollectResult:
    """Plan and carry out a collection. Safe to repeat after a crash at any point.

    Args:
        root: the dataset.
        mirror: its backup, which takes the shards of replaced versions.
        rules: what stays.
        progress: called with shards done and in all of each version that is backed up.

    Raises:
        DatasetError: a published version can't be read, so nothing says what it needs.
        DamagedDatasetError: the current version is not whole.
        PublishConflictError: somebody published meanwhile; nothing was deleted.
    """
    healed = put_back(root, mirror)
    plan = plan_collection(root, mirror, rules)
    stores = places(root, mirror)
    _save_moved(root, mirror, plan, progress)
    trashed = [item for item in plan.leftovers if item.to_trash]
    with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
        list(
            threads.map(
                lambda item: stores[item.place].copy(item.key, root.meta, item.trash_key, size=item.num_bytes), trashed
            )
        )
    returned = _delete(root, mirror, plan)
    _handle_uploads(root, mirror, plan)
    return CollectResult(plan, healed, returned)


def put_back(root: DatasetRoot, mirror: DatasetRoot) -> tuple[str, ...]:
    """Put back from trash and mirror what a published version names and the root lacks; return the keys.

    Raises:
        DamagedDatasetError: the current version lacks shards that are nowhere; nothing may be collected then.
    """
    pointer = root.pointer()
    if pointer is None:
        return ()
    trash = {info.key: info.size for info in root.meta.list(TRASH)}
    returned: list[str] = []
    for name in dict.fromkeys(move.manifest for move in pointer.record.history):
        returned += _from_trash(root, trash, [("root", f"manifests/{name}.json")])
        manifest = root.manifest(name)
        returned += _from_trash(root, trash, [("meta", entry.index_key) for entry in manifest.shards])
        returned += _from_trash(root, trash, [("root", entry.key) for entry in manifest.shards])
        rejects = (sha256 for batch in manifest.batches for sha256 in batch.rejects)
        returned += _from_trash(root, trash, [("meta", f"rejects/{sha256}.jsonl") for sha256 in rejects])
    current = root.manifest_of(pointer.record)
    lacking = root.missing_shards(current.shards)
    gone = mirror.missing_shards(lacking)
    if gone:
        raise DamagedDatasetError(
            f"{current.name} in {root.uri} lacks {len(gone)} shards that are not in {mirror.uri} either, first "
            f"{gone[0].key}. Nothing was removed. Run `dflash verify`, then `dflash restore`."
        )
    copy_shards(mirror, root, lacking)
    return (*returned, *(entry.key for entry in lacking))


def _from_trash(root: DatasetRoot, trash: dict[str, int], wanted: Iterable[tuple[Place, str]]) -> list[str]:
    returned = []
    for place, key in wanted:
        source = f"{TRASH}/{place}/{key}"
        target = root.store if place == "root" else root.meta
        if source in trash and mark_of(target, key) is None:
            root.meta.copy(source, target, key, size=trash[source])
            returned.append(key)
    return returned


def _save_moved(root: DatasetRoot, mirror: DatasetRoot, plan: CollectPlan, progress: Progress) -> None:
    """Make sure that the mirror holds what the root loses: as versions that can be restored, compared by digest."""
    if not plan.moved:
        return
    for name in (*plan.backed_up, plan.pointer.record.manifest):
        backup_version(root, root.manifest(name), mirror, progress)
    copy_shards(root, mirror, plan.moved, check=True)


def _delete(root: DatasetRoot, mirror: DatasetRoot, plan: CollectPlan) -> tuple[str, ...]:
    """Delete what the plan says, and put back what a faster publisher named; receipts go before their shards."""
    moved = [entry.key for entry in plan.moved]
    in_root = [item.key for item in plan.leftovers if item.place == "root"]
    again = {item.trash_key for item in plan.leftovers if item.to_trash}  # thrown away anew: not old any more
    in_meta = [item.key for item in plan.leftovers if item.place == "meta" and item.key not in again]
    if not (moved or in_root or in_meta):
        return ()
    if mark_of(root.store, POINTER_KEY) != plan.pointer.etag:
        raise PublishConflictError(
            f"The pointer of {root.uri} moved while garbage was planned on {plan.pointer.record.manifest}. Nothing was "
            "deleted. Run it again: it plans on the new version."
        )
    root.meta.delete(in_meta)
    root.store.delete([*moved, *in_root])
    return _fence(root, mirror, plan.pointer)


def _fence(root: DatasetRoot, mirror: DatasetRoot, pointer: Pointer) -> tuple[str, ...]:
    """Make every publisher that read the pointer before now lose its race; put back what faster ones named."""
    returned: list[str] = []
    for _ in range(FENCE_ATTEMPTS):
        state = json.loads(root.store.read(POINTER_KEY))
        data = canonical_json(state | {FENCE_KEY: uuid.uuid4().hex})
        try:
            root.store.replace(POINTER_KEY, data, if_match=pointer.etag)
        except PreconditionError:
            found = root.pointer()
            if found is None:
                break
            pointer = found
            returned += put_back(root, mirror)
        else:
            return tuple(returned)
    raise PublishConflictError(
        f"Others published in {root.uri} all the while garbage was collected. What their versions name was put back; "
        "run it again when they are done."
    )


def _handle_uploads(root: DatasetRoot, mirror: DatasetRoot, plan: CollectPlan) -> None:
    """Abort unfinished uploads that an earlier run noted, and note the others."""
    stores = places(root, mirror)
    for place, upload in plan.aborted:
        stores[place].abort_upload(upload)
    if plan.noticed:
        note = canonical_json([[place, upload.key, upload.upload_id] for place, upload in plan.noticed])
        root.meta.put_if_absent(f"{SEEN_UPLOADS}/{sha256_hex(note)}.json", note)
