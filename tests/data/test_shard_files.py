"""Files of shards stay readable although another run clears the spool that they share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash.data.shard_files import ShardFiles, Spool
from dflash.data.shards import read_batches, read_index
from dflash.data.spool import INDEX_FILE, SHARD_FILE
from dflash.errors import IntegrityError
from tests.data.small_roots import ROWS_PER_SHARD, Small, open_root


def test_a_file_that_was_asked_for_outlives_the_spool(tmp_path: Path) -> None:
    small = Small(open_root(str(tmp_path / "train"), tmp_path), tmp_path / "work")
    entry = small.put_shard(0).shard
    spooled = tmp_path / "spool" / entry.fingerprint
    spooled.mkdir(parents=True)
    shutil.copy(small.root.fetch_shard(entry), spooled / SHARD_FILE)
    shutil.copy(small.root.fetch_index(entry), spooled / INDEX_FILE)
    files = ShardFiles(small.root, Spool(tmp_path / "spool", tmp_path / "links"))
    shard, index = files.shard(entry), files.index(entry)
    assert shard.parent == index.parent == tmp_path / "links"
    assert (files.shard(entry), files.index(entry)) == (shard, index)
    shutil.rmtree(spooled)
    assert sum(batch.num_rows for batch in read_batches(shard)) == read_index(index).num_rows == ROWS_PER_SHARD
    other = ShardFiles(small.root, Spool(tmp_path / "spool", tmp_path / "of another run"))
    assert other.shard(entry) == small.root.fetch_shard(entry)
    assert other.index(entry) == small.root.fetch_index(entry)


def test_a_damaged_shard_is_never_read(tmp_path: Path) -> None:
    small = Small(open_root(str(tmp_path / "train"), tmp_path), tmp_path / "work")
    entry = small.put_shard(0).shard
    spooled = tmp_path / "spool" / entry.fingerprint
    spooled.mkdir(parents=True)
    content = bytearray(small.root.fetch_shard(entry).read_bytes())
    content[len(content) // 2] ^= 1
    (spooled / SHARD_FILE).write_bytes(content)
    with pytest.raises(IntegrityError, match="made anew"):
        ShardFiles(small.root, Spool(tmp_path / "spool", tmp_path / "links")).shard(entry)
    small.root.fetch_shard(entry).write_bytes(content)
    with pytest.raises(IntegrityError, match="dflash restore"):
        ShardFiles(small.root).shard(entry)
