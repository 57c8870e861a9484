"""Tiny datasets for the tests of backups, collection and crashes: a root, its mirror, shards of a few rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import TokenizeOptions
from dflash.data.compatibility import Recipe
from dflash.data.dataset import DatasetRoot
from dflash.data.merge import merge_manifest, publish_merge, put_rejects, write_shards
from dflash.data.merge_plan import MergePlan, MergeRules, NewBatch, plan_merge
from dflash.data.rows import TokenizedRows
from dflash.data.shard_files import ShardFiles
from dflash.data.shards import ShardWriter
from dflash.manifest import Manifest, ShardReceipt, TokenizerRecord, batch_from_receipts, sha256_hex
from dflash.storage import S3Credentials, Store

TOKENIZER = TokenizerRecord(name="synthetic", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=50_000)
ROWS_PER_SHARD = 3
Wrap = Callable[[Store], Store]


def open_root(
    uri: str, work: Path, credentials: S3Credentials | None = None, wrap: Wrap = lambda store: store
) -> DatasetRoot:
    """A root, its stores wrapped for faults if asked."""
    root = DatasetRoot.open(uri, credentials, work / "cache")
    return DatasetRoot(root.uri, wrap(root.store), wrap(root.meta), root.cache)


def make_rows(first: int, count: int = ROWS_PER_SHARD) -> TokenizedRows:
    """Rows whose ids and contents differ from those of any other `first`."""
    lengths = [3 + row % 3 for row in range(count)]
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    return TokenizedRows(
        ids=np.concatenate(
            [np.arange(length, dtype=np.int32) + 10 * (first + row) for row, length in enumerate(lengths)]
        ),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        mask=mask,
        sample_ids=[f"s{first + row}" for row in range(count)],
        sources=["web"] * count,
        num_loss_tokens=np.array([length - 1 for length in lengths], np.int32),
        output_tokens=np.array([length - 1 for length in lengths], np.int32),
        finish_reasons=["stop"] * count,
        flags=np.zeros(count, np.uint16),
        scripts=["latin"] * count,
    )


@dataclass(frozen=True, slots=True)
class Small:
    """What tests do with a root; every step may be repeated."""

    root: DatasetRoot
    work: Path

    def put_shard(self, first: int, *, receipt: bool = True) -> ShardReceipt:
        """Put a shard in place, with its rejects and its receipt, as an upload does."""
        self.work.mkdir(parents=True, exist_ok=True)
        shard, index = self.work / f"{first}.arrow", self.work / f"{first}.index.arrow"
        with ShardWriter(shard, index) as writer:
            writer.write(make_rows(first))
            made = writer.close()
        entry = made.entry(sha256_hex(b"fingerprint %d" % first), "synthetic")
        rejects = json.dumps({"file": "a.jsonl", "line": first, "reason": "bad_json"}).encode() + b"\n"
        done = ShardReceipt(shard=entry, inputs=(), reject_reasons={"bad_json": 1}, rejects_sha256=sha256_hex(rejects))
        self.root.store.put_if_absent(entry.key, shard, sha256=entry.sha256)
        self.root.meta.put_if_absent(entry.index_key, index, sha256=entry.index_sha256)
        self.root.meta.put_if_absent(f"rejects/{done.rejects_sha256}.jsonl", rejects)
        if receipt:
            self.root.meta.put_if_absent(done.key, done.to_bytes())
        return done

    def batch(self, *firsts: int) -> NewBatch:
        """Shards in place, as one batch."""
        receipts = [self.put_shard(first) for first in firsts]
        put_rejects(self.root, receipts, self.work / "spool")
        record = batch_from_receipts(f"s3://completions/{firsts[0]}", receipts)
        return NewBatch(Recipe(TOKENIZER, TokenizeOptions()), record, tuple(receipt.shard for receipt in receipts), {})

    def plan(self, batch: NewBatch, **rules: Any) -> MergePlan:
        return plan_merge(self.root, batch, MergeRules(**rules), ShardFiles(self.root))

    def merge(
        self, *firsts: int, before_publish: Callable[[Manifest], object] = lambda _: None, **rules: Any
    ) -> Manifest:
        """Merge shards as one batch; `before_publish` gets the current version."""
        plan = self.plan(self.batch(*firsts), **rules)
        if plan.already_merged:
            assert plan.current is not None
            return plan.current
        manifest = merge_manifest(plan, write_shards(self.root, plan, ShardFiles(self.root), self.work / "rewritten"))
        if plan.current is not None:
            before_publish(plan.current)
        publish_merge(self.root, plan, manifest)
        return manifest

    def drop_first_shard(self) -> Manifest:
        """Publish a version without the first shard of the current one."""
        pointer, current = self.root.pointer(), self.root.manifest()
        shards = current.shards[1:]
        manifest = current.model_copy(
            update={
                "version": current.version + 1,
                "parent": current.name,
                "shards": shards,
                "counts": type(current.counts).of(shards),
            }
        )
        self.root.publish(manifest, expected=pointer)
        return manifest
