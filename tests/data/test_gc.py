"""Garbage collection: what goes, what stays, and that it can't take away what somebody is about to need."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_from_disk

from dflash.data.backup import backup_version, open_mirror, rollback
from dflash.data.collect import CollectRules, collect_garbage, plan_collection, put_back
from dflash.data.dataset import DatasetRoot
from dflash.data.merge import MergedShards, merge_manifest
from dflash.data.saved_format import datasets_state
from dflash.data.verify import verify_dataset
from dflash.errors import DamagedDatasetError, DatasetError, PublishConflictError, UsageError
from dflash.manifest import InputFile, Manifest, PointerMove, PointerRecord, ShardReceipt, canonical_json, sha256_hex
from dflash.storage import S3Store
from tests.data.small_roots import Small, open_root
from tests.storage.faults import FaultPlan, FaultStore

NOW = CollectRules(min_age_hours=0)
DAY = CollectRules()


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(open_root(str(tmp_path / "train"), tmp_path), tmp_path / "work")


@pytest.fixture
def mirror(small: Small) -> DatasetRoot:
    return open_mirror(small.root, None)


def keys(root: DatasetRoot) -> set[str]:
    return {info.key for info in root.store.list()} | {f"meta:{info.key}" for info in root.meta.list()}


def make_old(root: DatasetRoot, *names: str, hours: float = 25) -> None:
    """Let all objects whose key holds one of the names have been written long ago."""
    then = time.time() - 3600 * hours
    for folder in (root.uri, f"{root.uri}.meta"):
        for path in Path(folder).rglob("*"):
            if path.is_file() and (not names or any(name in str(path) for name in names)):
                os.utime(path, (then, then))


def assert_whole(root: DatasetRoot, manifest: Manifest) -> None:
    assert root.current() == manifest
    assert verify_dataset(root, manifest).problems == ()
    assert load_from_disk(root.uri).num_rows == manifest.counts.num_rows


def objects_of(receipt: ShardReceipt) -> set[str]:
    entry = receipt.shard
    rejects = f"meta:rejects/{receipt.rejects_sha256}.jsonl"
    return {entry.key, f"meta:{entry.index_key}", rejects, f"meta:{receipt.key}"}


def test_what_nothing_names_goes_through_the_trash(small: Small, mirror: DatasetRoot) -> None:
    current, orphan = small.merge(0), small.put_shard(90)
    lost = current.model_copy(update={"version": 7, "parent": current.name})
    small.root.store.put_if_absent(lost.key, lost.to_bytes())
    small.root.meta.put_if_absent("reports/refused-ab.html", b"<p>")
    needed = keys(small.root) - objects_of(orphan) - {lost.key}
    make_old(small.root)
    result = collect_garbage(small.root, mirror, DAY)
    assert {item.key for item in result.plan.leftovers} == {
        key.removeprefix("meta:") for key in objects_of(orphan) | {lost.key}
    }
    left = keys(small.root)
    assert left - needed == {
        f"meta:trash/root/{orphan.shard.key}",
        f"meta:trash/root/{lost.key}",
        f"meta:trash/meta/{orphan.shard.index_key}",
        f"meta:trash/meta/rejects/{orphan.rejects_sha256}.jsonl",
    }
    assert needed <= left
    collect_garbage(small.root, mirror, DAY)
    assert keys(small.root) == left, "what was thrown away just now stays in the trash"
    make_old(small.root)
    collect_garbage(small.root, mirror, DAY)
    assert keys(small.root) == needed
    assert_whole(small.root, current)


def test_what_is_young_stays(small: Small, mirror: DatasetRoot) -> None:
    current, orphan = small.merge(0), small.put_shard(90)
    before = keys(small.root)
    assert collect_garbage(small.root, mirror, DAY).plan.leftovers == ()
    make_old(small.root, orphan.shard.sha256, orphan.shard.index_sha256, str(orphan.rejects_sha256))
    assert collect_garbage(small.root, mirror, DAY).plan.leftovers == (), "a young receipt speaks of it"
    assert keys(small.root) == before
    make_old(small.root, "receipts")
    assert len(collect_garbage(small.root, mirror, DAY).plan.leftovers) == 4
    assert_whole(small.root, current)


def test_a_plan_changes_nothing_and_says_why(small: Small, mirror: DatasetRoot) -> None:
    small.merge(0, 10)
    orphan, current = small.put_shard(90), small.drop_first_shard()
    before = keys(small.root)
    plan = plan_collection(small.root, mirror, NOW).to_json()
    assert keys(small.root) == before
    assert (plan["current"], plan["kept"]) == (current.name, [current.name])
    assert plan["moved_bytes"] == small.root.manifest(1).shards[0].num_bytes
    reasons = {item["key"]: item["reason"] for item in plan["removed"]}
    assert reasons[f"root:{orphan.shard.key}"] == "no version and no backup names this shard"
    assert json.dumps(plan)


def test_shards_of_replaced_versions_are_moved_to_the_backup(small: Small, mirror: DatasetRoot) -> None:
    first = small.merge(0, 10)
    current = small.drop_first_shard()
    moved = first.shards[0]
    result = collect_garbage(small.root, mirror, NOW)
    assert [entry.sha256 for entry in result.plan.moved] == [moved.sha256]
    assert moved.key not in keys(small.root)
    assert f"meta:{moved.index_key}" in keys(small.root), "comparing versions reads indexes"
    assert result.plan.backed_up == (first.name,)
    assert_whole(small.root, current)
    assert_whole(mirror, current)
    assert verify_dataset(mirror, mirror.manifest(1)).problems == ()
    rollback(small.root, 1, mirror)
    assert_whole(small.root, first)


def test_a_damaged_copy_in_the_backup_is_mended_before_the_shard_goes(small: Small, mirror: DatasetRoot) -> None:
    first = small.merge(0, 10)
    backup_version(small.root, first, mirror)
    small.drop_first_shard()
    copy = Path(mirror.uri) / first.shards[0].key
    copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    collect_garbage(small.root, mirror, NOW)
    mirror.store.verify(first.shards[0].key, sha256=first.shards[0].sha256)
    assert first.shards[0].key not in keys(small.root)


def test_versions_that_are_kept_or_were_current_not_long_ago_stay_in_place(small: Small, mirror: DatasetRoot) -> None:
    first = small.merge(0, 10, 20)
    second = small.drop_first_shard()
    third = small.drop_first_shard()
    make_old(small.root)
    assert collect_garbage(small.root, mirror, DAY).plan.moved == (), "readers may have the others open"
    two = collect_garbage(small.root, mirror, CollectRules(keep=2, min_age_hours=0)).plan
    assert two.kept == (third.name, second.name)
    assert two.moved == first.shards[:1]
    assert collect_garbage(small.root, mirror, NOW).plan.moved == second.shards[:1]
    assert_whole(small.root, third)


def test_what_only_a_backup_names_is_no_garbage(small: Small, mirror: DatasetRoot, tmp_path: Path) -> None:
    current = small.merge(0)
    backup_version(small.root, current, mirror)
    other = Small(open_root(str(tmp_path / "other"), tmp_path), tmp_path / "work")
    other.merge(50)
    receipt = other.put_shard(0)
    collect_garbage(other.root, mirror, NOW)
    assert f"meta:{receipt.shard.index_key}" in keys(other.root)
    assert receipt.shard.key not in keys(other.root), "the backup has it: moved, not thrown away"
    assert f"meta:trash/root/{receipt.shard.key}" not in keys(other.root)


def test_nothing_goes_where_a_version_cannot_be_read(small: Small, mirror: DatasetRoot) -> None:
    first = small.merge(0)
    small.merge(10)
    small.put_shard(90)
    before = keys(small.root)
    manifest = Path(small.root.uri) / first.key
    content = manifest.read_bytes()
    manifest.write_bytes(b"{}")
    with pytest.raises(DatasetError, match="is not a valid Manifest"):
        collect_garbage(small.root, mirror, NOW)
    manifest.write_bytes(content)
    (Path(small.root.uri) / "state.json").unlink()
    with pytest.raises(DatasetError, match="has no pointer"):
        collect_garbage(small.root, mirror, NOW)
    assert keys(small.root) == before - {"state.json"}


def test_a_root_that_is_not_whole_is_refused_and_one_that_can_be_is_healed(small: Small, mirror: DatasetRoot) -> None:
    current = small.merge(0, 10)
    backup_version(small.root, current, mirror)
    small.root.store.delete([current.shards[0].key])
    assert collect_garbage(small.root, mirror, NOW).healed == (current.shards[0].key,)
    for root in (small.root, mirror):
        root.store.delete([current.shards[0].key])
    small.put_shard(90)
    before = keys(small.root)
    with pytest.raises(DamagedDatasetError, match="lacks 1 shards"):
        collect_garbage(small.root, mirror, NOW)
    assert keys(small.root) == before


def test_a_pointer_that_moves_while_garbage_is_planned_stops_it(small: Small, mirror: DatasetRoot) -> None:
    small.merge(0, 10)
    small.drop_first_shard()
    orphan = small.put_shard(90)
    with pytest.raises(PublishConflictError, match="Nothing was deleted"):
        collect_garbage(small.root, mirror, NOW, lambda _done, _total: rollback(small.root, 1))
    assert orphan.shard.key in keys(small.root)
    assert_whole(small.root, small.root.manifest(1))


class Intruder(FaultPlan):
    """Does something right after the root's objects were deleted."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def run(self, call: str, operation: Callable[[], object]) -> object:  # type: ignore[override]
        done = operation()
        if call.startswith("delete ") and "shards/" in call:
            self.act()
        return done


def test_what_a_faster_publisher_names_is_put_back(small: Small, mirror: DatasetRoot) -> None:
    """It looked at the shards before they were deleted, and swaps the pointer after that."""
    first = small.merge(0)
    pointer, orphan = small.root.pointer(), small.put_shard(90)
    assert pointer is not None
    shards = (*first.shards, orphan.shard)
    counts = type(first.counts).of(shards)
    update = {"version": 2, "parent": first.name, "shards": shards, "counts": counts}
    second = first.model_copy(update=update)
    small.root.store.put_if_absent(second.key, second.to_bytes())

    def swap() -> None:
        move = PointerMove(manifest=second.name, version=2, at=second.created_at, action="publish")
        record = PointerRecord(
            manifest=second.name,
            manifest_sha256=sha256_hex(second.to_bytes()),
            version=2,
            history=(*pointer.record.history, move),
        )
        data = canonical_json(datasets_state(second) | {"dflash": record.model_dump(mode="json")})
        small.root.store.replace("state.json", data, if_match=pointer.etag)

    store = FaultStore(small.root.store, Intruder(swap))
    result = collect_garbage(DatasetRoot(small.root.uri, store, small.root.meta, small.root.cache), mirror, NOW)
    assert set(result.put_back) >= {second.key, orphan.shard.key, orphan.shard.index_key}
    assert_whole(small.root, second)


def test_a_publisher_that_looked_before_loses_against_the_fence(small: Small, mirror: DatasetRoot) -> None:
    small.merge(0, 10)
    before = small.root.pointer()
    assert before is not None
    small.put_shard(90)
    collect_garbage(small.root, mirror, NOW)
    after = small.root.pointer()
    assert after is not None
    assert after.record == before.record
    assert after.etag != before.etag
    with pytest.raises(PublishConflictError):
        small.root.publish(small.root.manifest(), expected=before)
    assert collect_garbage(small.root, mirror, CollectRules(min_age_hours=1)).plan.leftovers == ()
    assert small.root.pointer() == after, "no fence where nothing goes"
    assert_whole(small.root, small.merge(20))


def test_files_of_a_dataset_adopted_in_place_go(small: Small, mirror: DatasetRoot) -> None:
    folder = Path(small.root.uri)
    old = {f"data-0000{number}-of-00002.arrow": b"old" * number for number in (1, 2)}
    for key, data in (old | {"README.md": b"mine", "data-00003-of-00002.arrow": b"mine too"}).items():
        small.root.store.put_if_absent(key, data)
    files = [
        InputFile(key=key, size=len(data), etag=None, sha256=sha256_hex(data), num_records=1, num_rejected=0)
        for key, data in old.items()
    ]
    batch = small.batch(0)
    record = batch.batch.model_copy(update={"source": small.root.uri, "inputs": tuple(files)})
    plan = small.plan(replace(batch, batch=record))
    manifest = merge_manifest(plan, MergedShards((), batch.shards, 0, 0, 0))
    small.root.publish(manifest, None, "adopt")
    make_old(small.root)
    assert collect_garbage(small.root, mirror, DAY).plan.leftovers == (), "its readers may be at work"
    (folder / "data-00002-of-00002.arrow").write_bytes(b"another file by now")
    collect_garbage(small.root, mirror, NOW)
    left = {path.name for path in folder.glob("*.*") if path.is_file()} - {".state.json.lock", "state.json"}
    assert left == {"README.md", "data-00002-of-00002.arrow", "data-00003-of-00002.arrow", "dataset_info.json"}
    assert_whole(small.root, manifest)


def test_rules_that_make_no_sense_are_refused() -> None:
    for keep, hours in ((0, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(UsageError):
            CollectRules(keep, hours)


def test_unfinished_uploads_are_noticed_and_aborted_when_old(small: Small, mirror: DatasetRoot) -> None:
    small.merge(0)
    part = Path(small.root.uri) / "shards" / ".ab.arrow.7-0-ffff.part"
    part.write_bytes(b"half")
    assert len(collect_garbage(small.root, mirror, DAY).plan.noticed) == 1
    assert collect_garbage(small.root, mirror, DAY).plan.aborted == (), "seen not long ago"
    make_old(small.root, "trash")
    assert len(collect_garbage(small.root, mirror, DAY).plan.aborted) == 1
    assert not part.exists()
    assert not [key for key in keys(small.root) if "trash" in key]


def test_on_a_server(s3_store: S3Store, tmp_path: Path) -> None:
    root = open_root(s3_store.uri, tmp_path, s3_store.credentials)
    small, mirror = Small(root, tmp_path / "work"), open_mirror(root, None, s3_store.credentials)
    first = small.merge(0, 10)
    current, orphan = small.drop_first_shard(), small.put_shard(90)
    put_back(root, mirror)
    upload = s3_store._control._begin(s3_store._control._target("shards/x"), "shards/x", checksum=None)
    assert collect_garbage(root, mirror, DAY).plan.leftovers == ()
    result = collect_garbage(root, mirror, NOW)
    assert [item.upload_id for _, item in result.plan.aborted] == [upload.upload_id]
    assert root.store.list_uploads() == ()
    assert not {orphan.shard.key, first.shards[0].key} & keys(root)
    assert root.meta.head(f"trash/root/{orphan.shard.key}").size == orphan.shard.num_bytes
    collect_garbage(root, mirror, NOW)
    assert root.meta.list("trash") == []
    assert verify_dataset(root, current).problems == ()
    rollback(root, 1, mirror)
    assert verify_dataset(root, first).problems == ()
