from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dflash.data.batches import BatchOrder, LocalShards
from dflash.data.dataset import DatasetRoot
from dflash.data.version_shards import IN_USE, VersionShards
from dflash.errors import DamagedDatasetError
from tests.train.tiny_run import publish_rows

if TYPE_CHECKING:
    from embedded.seaweedfs import SeaweedServer

NUM_SHARDS = 5


def ids_of(source: object) -> list[list[int]]:
    packs = BatchOrder(seed=1, pack_tokens=50, num_epochs=2).packs(source)  # type: ignore[arg-type]
    return [[int(token) for row in pack.rows for token in row.input_ids] for pack in packs]


@pytest.fixture
def on_s3(s3_server: SeaweedServer, tmp_path: Path) -> DatasetRoot:
    uri = f"{s3_server.uri}/shards-{tmp_path.name}"
    publish_rows(uri, tmp_path / "made", s3_server.credentials, num_shards=NUM_SHARDS)
    return DatasetRoot.open(uri, s3_server.credentials, tmp_path / "cache")


def test_a_local_root_is_read_in_place_and_pinned_to_its_version(tmp_path: Path) -> None:
    uri = str(tmp_path / "data")
    first = publish_rows(uri, tmp_path / "made")
    root = DatasetRoot.open(uri)
    source = VersionShards(root, first, tmp_path / "unused", 0)
    before = ids_of(source)
    publish_rows(uri, tmp_path / "made")
    assert ids_of(source) == before
    paths = [tmp_path / "data" / entry.key for entry in first.shards]
    scanned = LocalShards.scan(paths)
    assert (source.num_rows, source.num_tokens) == (scanned.num_rows, scanned.num_tokens)
    assert [source.fetch(index) for index in range(3)] == paths
    assert not (tmp_path / "unused").exists()


def test_downloads_stay_within_their_bytes_and_give_the_same_packs(on_s3: DatasetRoot, tmp_path: Path) -> None:
    manifest, folder = on_s3.manifest(), tmp_path / "shards"
    size = max(entry.num_bytes for entry in manifest.shards)
    requests = on_s3.store.counters.snapshot().bytes_down
    unlimited = VersionShards(on_s3, manifest, tmp_path / "all", 1 << 30)
    expected = ids_of(unlimited)
    assert on_s3.store.counters.snapshot().bytes_down - requests == sum(entry.num_bytes for entry in manifest.shards)

    source = VersionShards(on_s3, manifest, folder, 0)
    for index in (*range(NUM_SHARDS), 0, 3):
        assert source.fetch(index).name == f"{manifest.shards[index].sha256}.arrow"
        assert len(list(folder.iterdir())) <= IN_USE
    assert ids_of(VersionShards(on_s3, manifest, folder, 4 * size)) == expected
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * size
    source.close()
    assert not folder.exists()


def test_what_an_earlier_process_left_is_checked_before_it_is_used(on_s3: DatasetRoot, tmp_path: Path) -> None:
    manifest, folder = on_s3.manifest(), tmp_path / "shards"
    left = [VersionShards(on_s3, manifest, folder, 1 << 30).fetch(index) for index in range(2)]
    whole = left[0].read_bytes()
    left[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = on_s3.store.counters.snapshot().bytes_down
    again = VersionShards(on_s3, manifest, folder, 1 << 30)
    assert again.fetch(0).read_bytes() == whole
    again.fetch(1)
    assert on_s3.store.counters.snapshot().bytes_down - before == len(whole)


def test_a_missing_or_altered_shard_is_named(on_s3: DatasetRoot, tmp_path: Path) -> None:
    manifest = on_s3.manifest()
    entry = manifest.shards[2]
    whole = on_s3.store.read(entry.key)
    on_s3.store.delete([entry.key])
    source = VersionShards(on_s3, manifest, tmp_path / "shards", 0)
    with pytest.raises(DamagedDatasetError, match=rf"Shard 2 of {manifest.name} .*dflash restore"):
        source.fetch(2)
    on_s3.store.put_if_absent(entry.key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedDatasetError, match=r"Shard 2 of .*sha256"):
        source.fetch(2)


def test_a_damaged_local_shard_is_found_at_its_first_use(tmp_path: Path) -> None:
    uri = str(tmp_path / "data")
    manifest = publish_rows(uri, tmp_path / "made")
    path = tmp_path / "data" / manifest.shards[1].key
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedDatasetError, match="Shard 1 of"):
        VersionShards(DatasetRoot.open(uri), manifest, tmp_path / "unused", 0).fetch(1)
