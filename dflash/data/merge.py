"""Put a new batch behind the current version: a manifest that names the old and the new shards.

Only the old shards' indexes are read. Old shards themselves are neither read nor sent, except that `keep_new` rewrites
those of which rows are dropped. Steps: `check_compatible` before anything is made, `plan_merge`, `write_shards`,
`merge_manifest`, a backup, `publish_merge`. Every step may be repeated; a lost race is planned anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dflash.data.dataset import DatasetRoot, Pointer
from dflash.data.merge_plan import Cut, MergePlan
from dflash.data.plan import CODE_VERSION
from dflash.data.rewrite import RewrittenShard, drop_rows
from dflash.data.shard_files import ShardFiles
from dflash.data.spool import REJECTS_FILE
from dflash.errors import DamagedDatasetError, IncompatibleError
from dflash.manifest import Counts, Manifest, ShardEntry, ShardReceipt

WRITES_AT_ONCE: Final = 4  # Arrow, hashing and the upload release the interpreter's lock


@dataclass(frozen=True, slots=True)
class MergedShards:
    """The shards of the next version.

    Attributes:
        old, new: entries in order; shards without rows are gone.
        old_bytes_read: bytes of old shards that had to be read, to rewrite them: 0 unless `keep_new` met duplicates.
        old_bytes_sent: bytes of their rewritten form.
        num_rewritten: shards that were written anew, of both sides.
    """

    old: tuple[ShardEntry, ...]
    new: tuple[ShardEntry, ...]
    old_bytes_read: int
    old_bytes_sent: int
    num_rewritten: int


def write_shards(root: DatasetRoot, plan: MergePlan, files: ShardFiles, folder: Path) -> MergedShards:
    """Write what the plan rewrites and put it in place; shards that are kept whole are not touched.

    Args:
        root: the dataset.
        plan: what to do.
        files: where shards are read.
        folder: for the rewritten files, which are removed when they are stored.

    Raises:
        DamagedDatasetError: a shard and its index disagree.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(WRITES_AT_ONCE) as threads:
        rewritten = threads.map(lambda cut: _rewrite(root, cut, files, folder), plan.rewrites())
    old, new = (
        tuple(cut.entry if cut.keep is None else next(rewritten) for cut in cuts if not cut.is_empty)
        for cuts in (plan.old_cuts, plan.new_cuts)
    )
    before = {cut.entry.sha256 for cut in plan.old_cuts}
    return MergedShards(
        old,
        new,
        old_bytes_read=sum(cut.entry.num_bytes for cut in plan.old_rewrites()),
        old_bytes_sent=sum(entry.num_bytes for entry in old if entry.sha256 not in before),
        num_rewritten=len(plan.rewrites()),
    )


def _rewrite(root: DatasetRoot, cut: Cut, files: ShardFiles, folder: Path) -> ShardEntry:
    assert cut.keep is not None, "only cuts that lose rows are rewritten"
    made = drop_rows(cut.entry, cut.keep, files.shard(cut.entry), files.index(cut.entry), folder)
    put_shard(root, made)
    return made.entry


def put_shard(root: DatasetRoot, made: RewrittenShard) -> None:
    """Store a shard and its index, then remove the local files."""
    root.store.put_if_absent(made.entry.key, made.shard_path, sha256=made.entry.sha256)
    root.meta.put_if_absent(made.entry.index_key, made.index_path, sha256=made.entry.index_sha256)
    made.shard_path.unlink()
    made.index_path.unlink()


def merge_manifest(plan: MergePlan, shards: MergedShards) -> Manifest:
    """The next version: old shards, then new ones, in order.

    Raises:
        DamagedDatasetError: rows or tokens don't add up, so an index doesn't describe its shard.
        IncompatibleError: after dropping rows two shards of the old version are the same.
    """
    entries = (*shards.old, *shards.new)
    if len({entry.sha256 for entry in entries}) != len(entries):
        raise IncompatibleError(
            "Without the replaced rows two shards of the current version hold the same rows, which can't be told "
            "apart. Nothing was published. Merge with duplicates=keep_old."
        )
    counts = Counts.of(entries)
    before = plan.current.counts if plan.current is not None else Counts.of(())
    added = Counts.of(plan.new.shards)
    _check_sum("rows", (before.num_rows, added.num_rows, plan.dropped_rows), counts.num_rows)
    _check_sum("tokens", (before.num_tokens, added.num_tokens, plan.dropped_tokens), counts.num_tokens)
    num_duplicates = int((plan.notes or {})["duplicates"]["dropped_new"])
    batch = plan.new.batch.model_copy(update={"num_duplicates": num_duplicates})
    return Manifest(
        version=plan.version,
        parent=None if plan.current is None else plan.current.name,
        created_at=datetime.now(UTC).replace(microsecond=0),
        schema_version=plan.new.recipe.schema_version,
        code_version=CODE_VERSION,
        tokenizer=plan.new.recipe.tokenizer if plan.current is None else plan.current.tokenizer,
        options=plan.new.recipe.options,
        shards=entries,
        batches=(*(() if plan.current is None else plan.current.batches), batch),
        counts=counts,
        quality=plan.new.quality,
        gate_override_reason=plan.new.gate_override_reason,
        notes={"merge": plan.notes},
    )


def _check_sum(what: str, parts: tuple[int, int, int], total: int) -> None:
    old, new, dropped = parts
    if old + new - dropped != total:
        raise DamagedDatasetError(
            f"The {what} don't add up: {old:,} old + {new:,} new - {dropped:,} dropped = {old + new - dropped:,}, but "
            f"the merged shards hold {total:,}. An index doesn't describe its shard: run `dflash verify`."
        )


def publish_merge(root: DatasetRoot, plan: MergePlan, manifest: Manifest) -> Pointer:
    """Make the merged version current if the pointer is still the one that was planned on.

    Raises:
        PublishConflictError: another publisher was first; plan again.
    """
    return root.publish(manifest, expected=plan.pointer)


def put_rejects(root: DatasetRoot, receipts: Iterable[ShardReceipt], spool: Path) -> None:
    """Store the rejects of shards that are still spooled; the manifest names them even where the shard is rewritten."""
    for receipt in receipts:
        path = spool / receipt.shard.fingerprint / REJECTS_FILE
        if receipt.rejects_sha256 is not None and path.is_file():
            key = f"rejects/{receipt.rejects_sha256}.jsonl"
            root.meta.put_if_absent(key, path, sha256=receipt.rejects_sha256)
