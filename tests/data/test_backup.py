"""Backing up, restoring and rolling back, on folders and on a real S3 server."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from datasets import Dataset, load_from_disk

from dflash.data.backup import backup_version, open_mirror, rollback
from dflash.data.dataset import DatasetRoot
from dflash.data.restore import restore_version
from dflash.data.verify import verify_dataset
from dflash.errors import DatasetError, IntegrityError, PublishConflictError, UsageError
from dflash.manifest import Manifest
from dflash.storage import TransferLimits
from dflash.storage.s3_clients import open_botocore
from tests.data.small_roots import ROWS_PER_SHARD, Small, open_root


@dataclass(frozen=True, slots=True)
class Pair:
    """A root with three versions, of which all are backed up: 2 shards, then 3, then 2 others of them."""

    small: Small
    mirror: DatasetRoot
    versions: tuple[Manifest, ...]

    @property
    def root(self) -> DatasetRoot:
        return self.small.root


def make_pair(root: DatasetRoot, work: Path, mirror: DatasetRoot) -> Pair:
    small = Small(root, work)
    versions = (small.merge(0, 10), small.merge(20), small.drop_first_shard())
    for manifest in versions:
        backup_version(root, manifest, mirror)
    return Pair(small, mirror, versions)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    root = open_root(str(tmp_path / "train"), tmp_path)
    return make_pair(root, tmp_path / "work", open_mirror(root, None))


def assert_whole(root: DatasetRoot, manifest: Manifest) -> None:
    assert root.current() == manifest
    assert verify_dataset(root, manifest).problems == ()
    if root.store.local_path("state.json") is not None:
        assert load_from_disk(root.uri).num_rows == manifest.counts.num_rows


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def wipe(root: DatasetRoot) -> None:
    for uri in (root.uri, f"{root.uri}.meta"):
        shutil.rmtree(uri)


def test_a_backup_is_a_dataset_of_its_own(pair: Pair) -> None:
    assert_whole(pair.mirror, pair.versions[2])
    assert [move.manifest for move in pair.mirror.pointer().record.history] == [m.name for m in pair.versions]  # type: ignore[union-attr]


def test_a_second_backup_copies_only_what_is_new(tmp_path: Path) -> None:
    root = open_root(str(tmp_path / "train"), tmp_path)
    small, mirror, seen = Small(root, tmp_path / "work"), open_mirror(root, str(tmp_path / "far" / "away")), []
    first = backup_version(root, small.merge(0, 10), mirror, lambda done, total: seen.append((done, total)))
    assert (first.shards_copied, first.shards_kept, seen) == (2, 0, [(1, 2), (2, 2)])
    current = small.merge(20)
    second = backup_version(root, current, mirror)
    assert (second.shards_copied, second.shards_kept) == (1, 2)
    assert second.bytes_copied == current.shards[2].num_bytes + current.shards[2].index_bytes
    again = backup_version(root, current, mirror)
    assert (again.shards_copied, again.bytes_copied) == (0, 0)
    assert len(mirror.pointer().record.history) == 2  # type: ignore[union-attr]


def test_a_damaged_root_is_never_backed_up_as_sound(pair: Pair, tmp_path: Path) -> None:
    manifest = pair.versions[2]
    flip_byte(Path(pair.root.uri) / manifest.shards[0].key)
    other = open_mirror(pair.root, str(tmp_path / "other"))
    with pytest.raises(IntegrityError):
        backup_version(pair.root, manifest, other)
    assert other.pointer() is None


def test_a_damaged_backup_is_mended_by_the_next_one(pair: Pair) -> None:
    shard = Path(pair.mirror.uri) / pair.versions[2].shards[0].key
    shard.write_bytes(shard.read_bytes()[:-1])
    assert backup_version(pair.root, pair.versions[2], pair.mirror).shards_mended == 1
    flip_byte(shard)
    assert backup_version(pair.root, pair.versions[2], pair.mirror, check=True).shards_mended == 1
    assert_whole(pair.mirror, pair.versions[2])


def test_a_mirror_may_not_lie_in_the_dataset(pair: Pair) -> None:
    for target in (pair.root.uri, f"{pair.root.uri}/backups", f"{pair.root.uri}.meta/backups"):
        with pytest.raises(UsageError, match="lies in the dataset"):
            open_mirror(pair.root, target)


def test_a_lost_root_comes_back_with_all_its_versions(pair: Pair) -> None:
    wipe(pair.root)
    record = restore_version(pair.mirror, pair.root)
    assert (record.manifest, record.shards_copied) == (pair.versions[2].name, 2)
    assert record.versions == tuple(manifest.name for manifest in pair.versions)
    assert_whole(pair.root, pair.versions[2])
    for manifest in (pair.versions[0], pair.versions[1]):
        assert rollback(pair.root, manifest.version, pair.mirror) == manifest
        assert_whole(pair.root, manifest)


def test_an_older_version_is_restored_into_another_root(pair: Pair, tmp_path: Path) -> None:
    other = open_root(str(tmp_path / "elsewhere"), tmp_path)
    assert restore_version(pair.mirror, other, 1).manifest == pair.versions[0].name
    assert_whole(other, pair.versions[0])
    assert_whole(pair.root, pair.versions[2])


@pytest.mark.parametrize("content", [None, b"", b"not json", b"\xff\xfe", b"[]", b"7", b'{"dflash": {}}', b"{}"])
def test_a_pointer_of_any_damage_is_replaced(pair: Pair, content: bytes | None) -> None:
    path = Path(pair.root.uri) / "state.json"
    path.unlink() if content is None else path.write_bytes(content)
    record = restore_version(pair.mirror, pair.root)
    assert (record.shards_copied, record.lost, record.left_out) == (0, (), ())
    assert_whole(pair.root, pair.versions[2])


def test_every_kind_of_damage_is_mended(pair: Pair) -> None:
    folder, manifest = Path(pair.root.uri), pair.versions[2]
    (folder / manifest.shards[0].key).write_bytes(b"cut")
    (folder / manifest.shards[1].key).unlink()
    (folder / "dataset_info.json").write_bytes(b"{}")
    (folder / manifest.key).write_bytes(b"{}")
    (folder / pair.versions[0].key).unlink()
    shutil.rmtree(f"{folder}.meta")
    record = restore_version(pair.mirror, pair.root)
    assert record.shards_mended + record.shards_copied == 2
    assert_whole(pair.root, manifest)
    assert pair.root.manifest(1) == pair.versions[0]


def test_a_wrong_digest_of_the_right_size_is_found_on_demand(pair: Pair) -> None:
    manifest = pair.versions[2]
    flip_byte(Path(pair.root.uri) / manifest.shards[0].key)
    flip_byte(Path(pair.root.uri + ".meta") / manifest.shards[1].index_key)
    assert restore_version(pair.mirror, pair.root).shards_mended == 0
    assert restore_version(pair.mirror, pair.root, check=True).shards_mended == 2
    assert_whole(pair.root, manifest)


def test_restoring_what_is_whole_changes_nothing(pair: Pair) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(pair.root.uri).rglob("*")}
    restore_version(pair.mirror, pair.root, check=True)
    assert {path: path.stat().st_mtime_ns for path in Path(pair.root.uri).rglob("*")} == before


def test_a_version_newer_than_the_backup_is_kept_and_mended(pair: Pair) -> None:
    newest = pair.small.merge(30)
    (Path(pair.root.uri) / newest.shards[0].key).unlink()
    assert restore_version(pair.mirror, pair.root).manifest == newest.name
    assert_whole(pair.root, newest)
    (Path(pair.root.uri) / newest.shards[-1].key).unlink()
    with pytest.raises(DatasetError, match=r"lacks 1 shards, of which .* lacks 1 too"):
        restore_version(pair.mirror, pair.root)
    assert restore_version(pair.mirror, pair.root, 3).manifest == pair.versions[2].name
    assert_whole(pair.root, pair.versions[2])


def test_a_version_that_only_its_manifest_tells_of_is_named_and_can_be_taken(pair: Pair) -> None:
    newest = pair.small.merge(30)
    (Path(pair.root.uri) / "state.json").unlink()
    assert restore_version(pair.mirror, pair.root).left_out == (newest.name,)
    assert_whole(pair.root, pair.versions[2])
    assert restore_version(pair.mirror, pair.root, newest.name).left_out == ()
    assert_whole(pair.root, newest)


def test_a_lost_manifest_is_reported(pair: Pair) -> None:
    newest = pair.small.merge(30)
    (Path(pair.root.uri) / newest.key).unlink()
    with pytest.raises(DatasetError, match=f"manifest of {newest.name} is whole neither"):
        restore_version(pair.mirror, pair.root)
    assert restore_version(pair.mirror, pair.root, 3).lost == (newest.name,)
    assert_whole(pair.root, pair.versions[2])


def test_a_damaged_backup_is_never_restored(pair: Pair) -> None:
    key = pair.versions[2].shards[0].key
    flip_byte(Path(pair.mirror.uri) / key)
    (Path(pair.root.uri) / key).write_bytes(b"cut")
    with pytest.raises(IntegrityError, match="expected sha256"):
        restore_version(pair.mirror, pair.root)
    assert (Path(pair.root.uri) / key).read_bytes() == b"cut"


def test_nothing_to_restore_from_is_an_error(pair: Pair, tmp_path: Path) -> None:
    empty = open_root(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(DatasetError, match="holds no backup"):
        restore_version(empty, open_root(str(tmp_path / "new"), tmp_path))
    with pytest.raises(DatasetError, match="has a version 9"):
        restore_version(pair.mirror, pair.root, 9)


def test_another_saved_dataset_is_not_overwritten(pair: Pair, tmp_path: Path) -> None:
    Dataset.from_dict({"a": [1]}).save_to_disk(tmp_path / "theirs")
    state = (tmp_path / "theirs" / "state.json").read_bytes()
    with pytest.raises(DatasetError, match="not one of ours"):
        restore_version(pair.mirror, open_root(str(tmp_path / "theirs"), tmp_path))
    assert (tmp_path / "theirs" / "state.json").read_bytes() == state


def test_a_publisher_during_a_restore_wins(pair: Pair) -> None:
    (Path(pair.root.uri) / pair.versions[0].shards[0].key).unlink()
    with pytest.raises(PublishConflictError, match="another publisher"):
        restore_version(pair.mirror, pair.root, 1, lambda _done, _total: pair.small.merge(30))
    assert_whole(pair.root, pair.root.manifest(4))


def test_a_rollback_fetches_shards_that_were_moved_out(pair: Pair) -> None:
    (Path(pair.root.uri) / pair.versions[0].shards[0].key).unlink()
    with pytest.raises(DatasetError, match="1 of its shards are not in"):
        rollback(pair.root, 1)
    assert_whole(pair.root, pair.versions[2])
    rollback(pair.root, 1, pair.mirror)
    assert_whole(pair.root, pair.versions[0])
    history = pair.root.pointer().record.history  # type: ignore[union-attr]
    assert (history[-1].action, history[-1].version) == ("rollback", 1)
    assert pair.small.merge(30).version == 4, "a number is never used twice"


def test_a_rollback_to_the_current_version_is_none(pair: Pair) -> None:
    state = (Path(pair.root.uri) / "state.json").read_bytes()
    rollback(pair.root, pair.versions[2].name, pair.mirror)
    assert (Path(pair.root.uri) / "state.json").read_bytes() == state


def test_on_a_server_and_from_there_to_a_folder(s3_server: object, tmp_path: Path) -> None:
    uri, credentials = f"{s3_server.uri}/{uuid.uuid4().hex}", s3_server.credentials  # type: ignore[attr-defined]
    root = open_root(uri, tmp_path, credentials)
    pair = make_pair(root, tmp_path / "work", open_mirror(root, None, credentials))
    assert pair.mirror.uri == f"{uri}.backups"
    sent = pair.mirror.store.counters.snapshot().bytes_up
    assert sent < pair.versions[0].shards[0].num_bytes * 20, "copies are the server's own; manifests are sent"
    for key in (pair.versions[2].shards[0].key, "state.json"):
        root.store.replace(key, b"damaged", if_match=root.store.head(key).etag)
    root.meta.delete([pair.versions[2].shards[0].index_key])
    record = restore_version(pair.mirror, root)
    assert (record.shards_mended, record.versions) == (1, tuple(manifest.name for manifest in pair.versions))
    assert_whole(root, pair.versions[2])
    local = open_root(str(tmp_path / "local"), tmp_path)
    restore_version(pair.mirror, local)
    assert_whole(local, pair.versions[2])
    assert len(json.loads(local.store.read("state.json"))["_data_files"]) * ROWS_PER_SHARD == 6


def test_a_backup_in_another_bucket(s3_server: object, tmp_path: Path) -> None:
    credentials, bucket = s3_server.credentials, f"backups-{uuid.uuid4().hex[:8]}"  # type: ignore[attr-defined]
    client = open_botocore(credentials, TransferLimits(), read_timeout_s=15)
    client.create_bucket(Bucket=bucket)
    client.close()
    root = open_root(f"{s3_server.uri}/{uuid.uuid4().hex}", tmp_path, credentials)  # type: ignore[attr-defined]
    manifest = Small(root, tmp_path / "work").merge(0)
    mirror = open_mirror(root, f"s3://{bucket}/train", credentials)
    assert backup_version(root, manifest, mirror).shards_copied == 1
    assert_whole(mirror, manifest)
    root.store.delete(["state.json", manifest.shards[0].key])
    assert restore_version(mirror, root).shards_copied == 1
    assert_whole(root, manifest)
