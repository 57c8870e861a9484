"""Merging a batch against rewriting the dataset: seconds and bytes, on a real S3 server.

    python benchmarks/merge.py [--megabytes 2048] [--shards 20] [--share 0.1] [--json]

Ours names the old shards in a new manifest; the usual way loads the dataset, appends with `concatenate_datasets` and
saves all of it again. Both start from the same published version and the same tokenized batch, which lies on this
machine. The backup that the flow makes first is timed as a row of its own, because its bytes move inside the server.
The last row swaps the pointer of a version with ten times as many shards.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, whose tokenize.py hides Python's own

import argparse  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from datasets import Dataset, concatenate_datasets, load_from_disk  # noqa: E402

from benchmarks.measure import print_table  # noqa: E402
from dflash.config import TokenizeOptions  # noqa: E402
from dflash.data.backup import backup_version, open_mirror  # noqa: E402
from dflash.data.compatibility import Recipe  # noqa: E402
from dflash.data.dataset import DatasetRoot  # noqa: E402
from dflash.data.merge import merge_manifest, publish_merge, write_shards  # noqa: E402
from dflash.data.merge_plan import MergeRules, NewBatch, ShardFiles, plan_merge  # noqa: E402
from dflash.data.rows import TokenizedRows  # noqa: E402
from dflash.data.shards import ShardWriter  # noqa: E402
from dflash.manifest import ShardEntry, ShardReceipt, TokenizerRecord, batch_from_receipts, fingerprint_of  # noqa: E402
from dflash.storage import S3Credentials, Store, TransferCounts  # noqa: E402
from embedded.seaweedfs import SeaweedConfig, SeaweedServer, start_seaweedfs, stop_seaweedfs  # noqa: E402

UPLOADS_AT_ONCE = 8  # the flow uploads every shard in a task of its own
TOKENS_PER_ROW = 2000
BYTES_PER_ROW = TOKENS_PER_ROW * 4.2  # an id, and a bit of the mask
RECIPE = Recipe(
    TokenizerRecord(name="synthetic", fingerprint="0" * 64, template_fingerprint="0" * 64, vocab_size=250_000),
    TokenizeOptions(),
)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard on this machine."""

    entry: ShardEntry
    shard: Path
    index: Path


def make_shards(folder: Path, num_shards: int, rows_per_shard: int, first: int = 0) -> list[LocalShard]:
    """Shards of random rows with ids that go on from `first`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number in range(num_shards):
        paths = folder / f"{number}.arrow", folder / f"{number}.index.arrow"
        with ShardWriter(*paths) as writer:
            for start in range(0, rows_per_shard, 1000):
                row = first + number * rows_per_shard + start
                writer.write(_rows(row, min(1000, rows_per_shard - start)))
            written = writer.close()
        entry = written.entry(fingerprint_of({"shard": written.shard.sha256}), "synthetic")
        shards.append(LocalShard(entry, *paths))
    return shards


def _rows(first: int, count: int) -> TokenizedRows:
    rng = np.random.default_rng(first)
    mask = np.tile(np.arange(TOKENS_PER_ROW) >= TOKENS_PER_ROW // 4, count)
    loss = np.full(count, TOKENS_PER_ROW - TOKENS_PER_ROW // 4, np.int32)
    return TokenizedRows(
        ids=rng.integers(0, 250_000, count * TOKENS_PER_ROW).astype(np.int32),
        offsets=np.arange(count + 1, dtype=np.int64) * TOKENS_PER_ROW,
        mask=mask,
        sample_ids=[f"sample-{row:09d}" for row in range(first, first + count)],
        sources=["chat"] * count,
        num_loss_tokens=loss,
        output_tokens=loss,
        finish_reasons=["stop"] * count,
        flags=np.zeros(count, np.uint16),
        scripts=["latin"] * count,
    )


def merge(root: DatasetRoot, shards: list[LocalShard], name: str, work: Path) -> None:
    """Upload the batch, plan, publish: what the flow does after its gate, less the backup."""
    with ThreadPoolExecutor(UPLOADS_AT_ONCE) as threads:
        for _ in threads.map(lambda item: _upload(root, item), shards):
            pass
    receipts = [ShardReceipt(shard=s.entry, inputs=(), reject_reasons={}, rejects_sha256=None) for s in shards]
    batch = NewBatch(RECIPE, batch_from_receipts(name, receipts), tuple(item.entry for item in shards), {})
    files = ShardFiles(root)
    plan = plan_merge(root, batch, MergeRules(), files)
    publish_merge(root, plan, merge_manifest(plan, write_shards(root, plan, files, work)))


def _upload(root: DatasetRoot, item: LocalShard) -> None:
    root.store.put_if_absent(item.entry.key, item.shard, sha256=item.entry.sha256)
    root.meta.put_if_absent(item.entry.index_key, item.index, sha256=item.entry.index_sha256)


def rewrite(server: SeaweedServer, uri: str, shards: list[LocalShard]) -> int:
    """Load, concatenate, save all of it under another prefix; return the bytes that were sent and read."""
    options = _fsspec_options(server.credentials)
    old = load_from_disk(uri, storage_options=options)
    new = concatenate_datasets([Dataset.from_file(str(item.shard)) for item in shards])
    whole = concatenate_datasets([old, new])
    whole.save_to_disk(f"{uri}-rewritten", num_shards=len(shards) * 10, storage_options=options)
    return int(old.data.nbytes + whole.data.nbytes)


def _fsspec_options(credentials: S3Credentials) -> dict[str, Any]:
    assert credentials.secret_access_key is not None, "the server makes credentials"
    return {
        "key": credentials.access_key_id,
        "secret": credentials.secret_access_key.get_secret_value(),
        "client_kwargs": {"endpoint_url": credentials.endpoint_url},
    }


def compare(server: SeaweedServer, folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    rows = int(arguments.megabytes * 1e6 / BYTES_PER_ROW / arguments.shards)
    uri = f"{server.uri}/train"
    root = DatasetRoot.open(uri, server.credentials, folder / "cache")
    merge(root, make_shards(folder / "old", arguments.shards, rows), "old", folder / "work")
    num_new = max(1, round(arguments.shards * arguments.share))
    batch = make_shards(folder / "new", num_new, rows, first=arguments.shards * rows)
    rewritten: list[int] = []
    theirs, _ = _timed(root, lambda: rewritten.append(rewrite(server, uri, batch)))
    current, mirror = root.manifest(), open_mirror(root, None, server.credentials)
    backup, moved = _timed(root, lambda: backup_version(root, current, mirror))
    root = DatasetRoot.open(uri, server.credentials, folder / "empty-cache")
    ours, counts = _timed(root, lambda: merge(root, batch, "new", folder / "work"))
    assert root.manifest().counts.num_rows == (arguments.shards + num_new) * rows, "rows were lost"
    sent = counts.bytes_up + counts.bytes_down
    yield _row("concatenate_datasets + save_to_disk", theirs, rewritten[0])
    yield _row("merge", ours, sent) | {
        "times faster": round(theirs / ours, 1),
        "times less": round(rewritten[0] / sent),
    }
    yield _row("backup before it (inside the server)", backup, moved.bytes_up + moved.bytes_down)
    for factor in (1, 10):
        yield _row(
            f"pointer swap, {arguments.shards * factor} shards", *_swap(server, folder, arguments.shards * factor)
        )


def _swap(server: SeaweedServer, folder: Path, num_shards: int) -> tuple[float, int]:
    """Seconds and bytes of publishing behind a version of many tiny shards."""
    uri = f"{server.uri}/many-{num_shards}"
    root = DatasetRoot.open(uri, server.credentials, folder / "cache")
    merge(root, make_shards(folder / f"many-{num_shards}", num_shards, 1), "many", folder / "work")
    one = make_shards(folder / f"one-{num_shards}", 1, 1, first=10**8)
    seconds, counts = _timed(root, lambda: merge(root, one, "one", folder / "work"))
    return seconds, counts.bytes_up


def _timed(root: DatasetRoot, work: Callable[[], object]) -> tuple[float, TransferCounts]:
    """Seconds of a piece of work and what the root's two stores moved over the network meanwhile."""
    before, start = _counts(root.store, root.meta), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, _counts(root.store, root.meta)
    return seconds, TransferCounts(after.bytes_up - before.bytes_up, after.bytes_down - before.bytes_down)


def _counts(*stores: Store) -> TransferCounts:
    counts = [store.counters.snapshot() for store in stores]
    return TransferCounts(sum(c.bytes_up for c in counts), sum(c.bytes_down for c in counts))


def _row(name: str, seconds: float, num_bytes: int) -> dict[str, Any]:
    columns = {"what": name, "seconds": round(seconds, 2), "MB over the network": round(num_bytes / 1e6, 2)}
    return columns | {"times faster": "", "times less": ""}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=2048)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start_seaweedfs(folder / "s3", SeaweedConfig(attached=True))
        try:
            print_table(list(compare(server, folder, arguments)), as_json=arguments.json)
        finally:
            stop_seaweedfs(folder / "s3")


if __name__ == "__main__":
    main()
