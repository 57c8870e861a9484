"""Merging and adopting on a real S3 server: what moves, and what readers see."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset, load_from_disk

from dflash.config import TokenizeOptions
from dflash.data.adopt import Adoption, adopt_dataset
from dflash.data.compatibility import Recipe
from dflash.data.dataset import DatasetRoot
from dflash.data.merge_plan import MergeRules
from dflash.data.verify import verify_dataset
from dflash.manifest import TokenizerRecord
from dflash.storage import open_store
from embedded.seaweedfs import SeaweedServer

TOKENIZER = TokenizerRecord(name="synthetic", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=1_000)


@pytest.fixture
def uri(s3_server: SeaweedServer) -> str:
    return f"{s3_server.uri}/{uuid.uuid4().hex}"


@pytest.fixture
def reading(s3_server: SeaweedServer) -> dict[str, Any]:
    """What datasets needs to read from the server."""
    credentials = s3_server.credentials
    assert credentials.secret_access_key is not None
    return {
        "key": credentials.access_key_id,
        "secret": credentials.secret_access_key.get_secret_value(),
        "client_kwargs": {"endpoint_url": credentials.endpoint_url},
    }


def ids_in_another_process(uri: str, reading: dict[str, Any]) -> list[str]:
    """What a new process reads; `datasets` gives one process the copy that it made first, whatever the version."""
    script = (
        "import json, sys, datasets; uri, reading = json.load(sys.stdin);"
        "json.dump(list(datasets.load_from_disk(uri, storage_options=reading)['sample_id']), sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps([uri, reading]), capture_output=True, text=True, check=True
    )
    names: list[str] = json.loads(done.stdout)
    return names


def test_a_merge_moves_the_new_shards_and_little_else(
    s3_server: SeaweedServer, uri: str, reading: dict[str, Any], sandbox: Any, sample: Any, tmp_path: Path
) -> None:
    sandbox.root = DatasetRoot.open(uri, s3_server.credentials, tmp_path / "cache")
    old = [[sample(f"{part}-{row}", 1000 * part + row) for row in range(500)] for part in range(3)]
    first = sandbox.merge(sandbox.batch(*old, name="one"))
    reader = load_from_disk(uri, storage_options=reading)
    sandbox.root = DatasetRoot.open(uri, s3_server.credentials, tmp_path / "another machine")
    batch = sandbox.batch([sample(f"new-{row}", 9000 + row) for row in range(100)], name="two")
    shard = batch.shards[0]
    second = sandbox.merge(batch)
    data, meta = (store.counters.snapshot() for store in (sandbox.root.store, sandbox.root.meta))
    small = 3 * len(second.to_bytes()) + 10_000
    assert data.bytes_up < shard.num_bytes + small
    assert data.bytes_down < small < sum(entry.num_bytes for entry in first.shards)
    assert meta.bytes_down == sum(entry.index_bytes for entry in second.shards), "indexes are read, once"
    names = [row.id for part in old for row in part] + [f"new-{row}" for row in range(100)]
    assert ids_in_another_process(uri, reading) == names
    assert reader.num_rows == len(reader["input_ids"][:]) == 1500, "who opened the old version goes on reading it"
    shards = [str(sandbox.root.fetch_shard(entry)) for entry in second.shards]
    assert load_dataset("arrow", data_files=shards, split="train", cache_dir=str(tmp_path / "hf")).num_rows == 1600
    assert verify_dataset(sandbox.root, second).problems == ()


def test_keep_new_downloads_just_the_shards_it_rewrites(
    s3_server: SeaweedServer, uri: str, sandbox: Any, sample: Any, tmp_path: Path
) -> None:
    sandbox.root = DatasetRoot.open(uri, s3_server.credentials, tmp_path / "cache")
    old = [[sample(f"{part}-{row}", 10_000 * part + row) for row in range(2000)] for part in range(3)]
    first = sandbox.merge(sandbox.batch(*old, name="one"))
    sandbox.root = DatasetRoot.open(uri, s3_server.credentials, tmp_path / "another machine")
    batch = sandbox.batch([sample("1-7", 90_000)], name="two")
    second = sandbox.merge(batch, MergeRules(duplicates="keep_new"))
    fetched = {path.name for path in (tmp_path / "another machine" / "shards").iterdir()}
    assert fetched == {f"{first.shards[1].sha256}.arrow"}
    assert second.counts.num_rows == 6000
    assert verify_dataset(sandbox.root, second).problems == ()


@pytest.mark.parametrize("sample_ids", [True, False])
def test_a_saved_dataset_on_s3_is_adopted(
    s3_server: SeaweedServer, uri: str, reading: dict[str, Any], tmp_path: Path, sample_ids: bool
) -> None:
    columns: dict[str, Any] = {"input_ids": [[n, n, n] for n in range(40)], "loss_mask": [[False, True, True]] * 40}
    if sample_ids:
        columns |= {"sample_id": [f"s{n}" for n in range(40)]}
    Dataset.from_dict(columns).save_to_disk(f"{uri}/old", num_shards=3, storage_options=reading)
    root = DatasetRoot.open(f"{uri}/train", s3_server.credentials, tmp_path / "cache")
    recipe = Recipe(TOKENIZER, TokenizeOptions())
    source = open_store(f"{uri}/old", s3_server.credentials)
    manifest = adopt_dataset(Adoption(source, root, recipe.tokenizer, recipe.options), tmp_path / "work")
    loaded = load_from_disk(root.uri, storage_options=reading)
    assert loaded["input_ids"][:] == columns["input_ids"]
    assert loaded["sample_id"][0] == ("s0" if sample_ids else "data-00000-of-00003.arrow:0")
    assert verify_dataset(root, manifest).problems == ()
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == []
