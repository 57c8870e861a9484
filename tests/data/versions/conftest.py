"""Small dataset roots made of synthetic rows: no tokenizer, no processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dflash.config import TokenizeOptions
from dflash.data.compatibility import Recipe
from dflash.data.dataset import DatasetRoot
from dflash.data.merge import MergedShards, merge_manifest, publish_merge, write_shards
from dflash.data.merge_plan import MergePlan, MergeRules, NewBatch, plan_merge
from dflash.data.rows import TokenizedRows
from dflash.data.shard_files import ShardFiles
from dflash.data.shards import ShardWriter
from dflash.manifest import Manifest, ShardReceipt, TokenizerRecord, batch_from_receipts, fingerprint_of

TOKENIZER = TokenizerRecord(
    name="synthetic", fingerprint="f" * 64, template_fingerprint="e" * 64, vocab_size=20_000_000
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: its id, a number that decides its tokens, its source."""

    id: str
    content: int
    source: str = "web"


def make_rows(samples: Sequence[Sample]) -> TokenizedRows:
    lengths = [3 + sample.content % 4 for sample in samples]
    ids = [np.arange(10 * s.content, 10 * s.content + n, dtype=np.int32) for s, n in zip(samples, lengths, strict=True)]
    masks = [np.arange(length) > 0 for length in lengths]
    return TokenizedRows(
        ids=np.concatenate(ids),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        mask=np.concatenate(masks),
        sample_ids=[sample.id for sample in samples],
        sources=[sample.source for sample in samples],
        num_loss_tokens=np.array([length - 1 for length in lengths], np.int32),
        output_tokens=np.array([length - 1 for length in lengths], np.int32),
        finish_reasons=["stop"] * len(samples),
        flags=np.zeros(len(samples), np.uint16),
        scripts=["latin"] * len(samples),
    )


@dataclass
class Sandbox:
    """A root in a folder, and what tests do with it."""

    root: DatasetRoot
    work: Path
    recipe: Recipe = field(default_factory=lambda: Recipe(TOKENIZER, TokenizeOptions()))

    def batch(self, *shards: Sequence[Sample], name: str = "batch") -> NewBatch:
        """Put shards of these samples in place and describe them as one batch."""
        receipts = [self._receipt(samples, f"{name}-{number}") for number, samples in enumerate(shards)]
        entries = tuple(receipt.shard for receipt in receipts)
        return NewBatch(self.recipe, batch_from_receipts(f"s3://completions/{name}", receipts), entries, {})

    def _receipt(self, samples: Sequence[Sample], name: str) -> ShardReceipt:
        fingerprint = fingerprint_of({"name": name, "samples": [[s.id, s.content, s.source] for s in samples]})
        shard, index = self.work / "shard.arrow", self.work / "index.arrow"
        with ShardWriter(shard, index) as writer:
            writer.write(make_rows(samples))
            written = writer.close()
        entry = written.entry(fingerprint, "synthetic")
        self.root.store.put_if_absent(entry.key, shard)
        self.root.meta.put_if_absent(entry.index_key, index)
        return ShardReceipt(shard=entry, inputs=(), reject_reasons={}, rejects_sha256=None)

    def plan(self, batch: NewBatch, rules: MergeRules | None = None) -> MergePlan:
        return plan_merge(self.root, batch, rules or MergeRules(), ShardFiles(self.root))

    def write(self, plan: MergePlan) -> MergedShards:
        return write_shards(self.root, plan, ShardFiles(self.root), self.work / "rewritten")

    def merge(self, batch: NewBatch, rules: MergeRules | None = None) -> Manifest:
        """All steps; returns the manifest that is current afterwards."""
        plan = self.plan(batch, rules)
        if plan.already_merged:
            assert plan.current is not None
            return plan.current
        manifest = merge_manifest(plan, self.write(plan))
        publish_merge(self.root, plan, manifest)
        return manifest


MakeSandbox = Callable[[], Sandbox]


@pytest.fixture
def make_sandbox(tmp_path_factory: pytest.TempPathFactory) -> MakeSandbox:
    def make() -> Sandbox:
        folder = tmp_path_factory.mktemp("sandbox")
        (folder / "work").mkdir()
        root = DatasetRoot.open(str(folder / "train"), cache=folder / "cache")
        return Sandbox(root, folder / "work")

    return make


@pytest.fixture
def sandbox(make_sandbox: MakeSandbox) -> Sandbox:
    return make_sandbox()


@pytest.fixture
def sample() -> type[Sample]:
    return Sample
