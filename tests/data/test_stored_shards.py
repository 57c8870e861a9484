"""Damage to what a store holds already, of the right size: found before it is reused, and made anew."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from dflash.config import GateThresholds, TokenizeRun
from dflash.data.stored_shards import ShardIndexes, put_content, put_receipt, whole_receipts
from dflash.data.tokenize_run import TokenizeSession, tokenize_dataset
from dflash.data.verify import verify_dataset
from dflash.data.workspace import Workspace
from dflash.errors import IntegrityError, ObjectNotFoundError
from dflash.manifest import ShardReceipt
from dflash.storage import Store
from embedded.seaweedfs import SeaweedServer
from tests.data.small_roots import Small, open_root


@pytest.fixture(params=["folder", "s3"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Small:
    """A root in a folder and one on a server."""
    if request.param == "folder":
        return Small(open_root(str(tmp_path / "train"), tmp_path), tmp_path / "work")
    server: SeaweedServer = request.getfixturevalue("s3_server")
    uri = f"{server.uri}/{uuid.uuid4().hex}"
    return Small(open_root(uri, tmp_path, server.credentials), tmp_path / "work")


def damage(store: Store, key: str) -> None:
    """Put other bytes of the same size in place."""
    data = bytearray(store.read(key))
    data[len(data) // 3] ^= 1  # of a receipt: in the digest of an input
    store.delete([key])
    store.put_if_absent(key, bytes(data))


def key_of(receipt: ShardReceipt, kind: str) -> str:
    keys = {"shard": receipt.shard.key, "index": receipt.shard.index_key, "receipt": receipt.key}
    return keys.get(kind, f"rejects/{receipt.rejects_sha256}.jsonl")


@pytest.mark.parametrize("kind", ["shard", "index", "rejects", "missing rejects"])
def test_a_receipt_whose_files_are_damaged_is_none(small: Small, kind: str) -> None:
    receipt, other = small.put_shard(0), small.put_shard(10)
    wanted = [item.shard.fingerprint for item in (receipt, other)]
    assert whole_receipts(small.root, wanted) == dict(zip(wanted, (receipt, other), strict=True))
    small.root.fetch_index(receipt.shard)  # a sound copy on this machine says nothing about the store
    if kind == "missing rejects":
        small.root.meta.delete([key_of(receipt, "rejects")])
    else:
        damage(small.root.store if kind == "shard" else small.root.meta, key_of(receipt, kind))
    assert whole_receipts(small.root, wanted) == {other.shard.fingerprint: other}


@pytest.mark.parametrize("kind", ["no JSON", "of another shard", "wrong counts"])
def test_a_damaged_receipt_is_none_and_is_replaced(small: Small, kind: str) -> None:
    receipt, other = small.put_shard(0), small.put_shard(10)
    wrong = receipt.model_copy(update={"shard": receipt.shard.model_copy(update={"num_rows": 4})})
    content = {
        "no JSON": b'{"format_version": 1, ',
        "of another shard": other.to_bytes(),
        "wrong counts": wrong.to_bytes(),
    }
    small.root.meta.delete([receipt.key])
    small.root.meta.put_if_absent(receipt.key, content[kind])
    assert whole_receipts(small.root, [receipt.shard.fingerprint]) == {}
    put_receipt(small.root, receipt)
    assert whole_receipts(small.root, [receipt.shard.fingerprint]) == {receipt.shard.fingerprint: receipt}


def test_a_receipt_by_another_encoder_stays_and_of_another_shard_is_refused(small: Small) -> None:
    receipt, other = small.put_shard(0), small.put_shard(10)
    put_receipt(small.root, receipt.model_copy(update={"shard": receipt.shard.model_copy(update={"encoder": "fast"})}))
    assert small.root.receipts([receipt.shard.fingerprint])[receipt.shard.fingerprint] == receipt
    moved = other.shard.model_copy(update={"fingerprint": receipt.shard.fingerprint})
    with pytest.raises(IntegrityError, match="Two different shards"):
        put_receipt(small.root, receipt.model_copy(update={"shard": moved}))


def test_content_takes_the_place_of_a_damaged_object(small: Small, tmp_path: Path) -> None:
    entry = small.put_shard(0).shard
    good = tmp_path / "good.arrow"
    good.write_bytes(small.root.store.read(entry.key))
    damage(small.root.store, entry.key)
    put_content(small.root.store, entry.key, good, entry.sha256)
    assert small.root.store.read(entry.key, sha256=entry.sha256) == good.read_bytes()
    put_content(small.root.store, entry.key, good, entry.sha256)
    good.write_bytes(b"damaged before the upload")
    with pytest.raises(IntegrityError, match="source of"):
        put_content(small.root.store, entry.key, good, entry.sha256)
    assert small.root.store.verify(entry.key, sha256=entry.sha256).size == entry.num_bytes


def test_a_damaged_index_is_never_read(small: Small) -> None:
    entry = small.put_shard(0).shard
    indexes = ShardIndexes([entry], small.root.fetch_index)
    assert [table.num_rows for table in indexes] == [entry.num_rows]
    if small.root.meta.local_path(entry.index_key) is None:
        copy = small.root.fetch_index(entry)
        copy.write_bytes(b"damaged copy")
        assert indexes[0].num_rows == entry.num_rows, "the copy alone was damaged"
        copy.unlink()
    damage(small.root.meta, entry.index_key)
    with pytest.raises(IntegrityError, match=rf"{entry.index_key}(.|\n)*sha256"):
        indexes[0]


def test_a_damaged_index_of_the_spool_is_never_read(small: Small, tmp_path: Path) -> None:
    spooled = tmp_path / "index.arrow"
    spooled.write_bytes(b"damaged")
    with pytest.raises(IntegrityError, match=r"index\.arrow was damaged(.|\n)*Run again"):
        ShardIndexes([small.put_shard(0).shard], lambda _: spooled)[0]


def write_source(folder: Path, name: str) -> None:
    """A good record and a bad one."""
    folder.mkdir(exist_ok=True)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"It is {name}."}]
    (folder / f"{name}.jsonl").write_text(json.dumps({"id": name, "messages": messages}) + "\n{\n")


def test_a_run_makes_anew_what_a_killed_run_left_damaged(tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    kinds = ("index", "receipt", "rejects", "shard", "sound")
    for kind in kinds:
        write_source(tmp_path / "source", kind)
    run = TokenizeRun(
        source=str(tmp_path / "source"),
        dataset=str(tmp_path / "ds"),
        tokenizer=str(smollm2_tokenizer_dir),
        num_workers=1,
        files_per_shard=1,
        gate=GateThresholds(override_reason="a handful of records"),
    )
    workspace = Workspace(tmp_path / "work", tmp_path / "cache")
    with TokenizeSession(run, None, workspace) as session:
        plans = session.plan()
        receipts = [session.tokenize(plan, session.download(plan.files)) for plan in plans]
        for kind, receipt in zip(kinds, receipts, strict=True):
            session.upload(receipt)
            if kind != "sound":
                damage(session.root.store if kind == "shard" else session.root.meta, key_of(receipt, kind))
        reused = session.finished(plans)
        assert [kind for kind, plan in zip(kinds, plans, strict=True) if plan.fingerprint in reused] == ["sound"]
    manifest = tokenize_dataset(run, None, workspace)
    assert [entry.sha256 for entry in manifest.shards] == [receipt.shard.sha256 for receipt in receipts]
    assert verify_dataset(session.root, manifest).problems == ()
    assert list(session.root.receipts(plan.fingerprint for plan in plans).values()) == receipts


def test_objects_that_are_gone_are_named(small: Small) -> None:
    entry = small.put_shard(0).shard
    small.root.meta.delete([entry.index_key])
    with pytest.raises(ObjectNotFoundError, match=entry.index_key):
        small.root.fetch_index(entry)
