"""Merging a batch against rewriting the dataset: seconds and bytes, on a real S3 server.

    python benchmarks/merge.py [--gb 2] [--shards 20] [--share 0.1] [--json]

Ours names the old shards in a new manifest; the usual way loads the dataset, appends with `concatenate_datasets` and
saves all of it again, which reads the old bytes and sends old and new. Both start from the same published version and
the same tokenized batch, which lies on this machine; libraries are loaded before either. A relay before the server
counts the bytes of both, headers included. Ours reads all indexes of the old shards, as on a machine that has none yet.
In the flow a shard is sent as soon as it is tokenized, while others still are, so that merging begins with the batch in
the store; the table has the merge, and the merge with that sending, which no way of adding a batch can spare.
The backup that the flow makes first is a row of its own, because its bytes move inside the server. The last rows merge
one shard into a version with ten times as many shards. Disk: six times the size of the set; memory: little.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, whose tokenize.py hides Python's own

import argparse  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from datasets import Dataset, concatenate_datasets, load_from_disk  # noqa: E402

from benchmarks.measure import print_table  # noqa: E402
from benchmarks.relay import Relay, counting_relay  # noqa: E402
from dflash.config import TokenizeOptions  # noqa: E402
from dflash.data.backup import backup_version, open_mirror  # noqa: E402
from dflash.data.compatibility import Recipe  # noqa: E402
from dflash.data.dataset import DatasetRoot  # noqa: E402
from dflash.data.merge import merge_manifest, publish_merge, write_shards  # noqa: E402
from dflash.data.merge_plan import MergeRules, NewBatch, plan_merge  # noqa: E402
from dflash.data.rows import TokenizedRows  # noqa: E402
from dflash.data.shard_files import ShardFiles  # noqa: E402
from dflash.data.shards import ShardWriter  # noqa: E402
from dflash.manifest import ShardEntry, ShardReceipt, TokenizerRecord, batch_from_receipts, fingerprint_of  # noqa: E402
from dflash.storage import S3Credentials  # noqa: E402
from embedded.seaweedfs import SeaweedConfig, start_seaweedfs, stop_seaweedfs  # noqa: E402

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


def send(root: DatasetRoot, shards: list[LocalShard]) -> None:
    """Upload a batch's shards: what tokenizing does."""
    with ThreadPoolExecutor(UPLOADS_AT_ONCE) as threads:
        for _ in threads.map(lambda item: _upload(root, item), shards):
            pass


def merge(root: DatasetRoot, shards: list[LocalShard], name: str, work: Path) -> float:
    """Plan and publish a batch that was sent: what the flow does after its gate, less the backup.

    Returns:
        The seconds that publishing took: asking for the new shards, putting the manifest, replacing the pointer.
    """
    receipts = [ShardReceipt(shard=s.entry, inputs=(), reject_reasons={}, rejects_sha256=None) for s in shards]
    batch = NewBatch(RECIPE, batch_from_receipts(name, receipts), tuple(item.entry for item in shards), {})
    files = ShardFiles(root)
    plan = plan_merge(root, batch, MergeRules(), files)
    manifest = merge_manifest(plan, write_shards(root, plan, files, work))
    start = time.perf_counter()
    publish_merge(root, plan, manifest)
    return time.perf_counter() - start


def _upload(root: DatasetRoot, item: LocalShard) -> None:
    root.store.put_if_absent(item.entry.key, item.shard, sha256=item.entry.sha256)
    root.meta.put_if_absent(item.entry.index_key, item.index, sha256=item.entry.index_sha256)


def rewrite(credentials: S3Credentials, uri: str, shards: list[LocalShard], num_shards: int) -> None:
    """Load, append, save all of it under another prefix."""
    options = _fsspec_options(credentials)
    old = load_from_disk(uri, storage_options=options)
    new = concatenate_datasets([Dataset.from_file(str(item.shard)) for item in shards])
    whole = concatenate_datasets([old, new])
    whole.save_to_disk(f"{uri}-rewritten", num_shards=num_shards, storage_options=options)


def _fsspec_options(credentials: S3Credentials) -> dict[str, Any]:
    assert credentials.secret_access_key is not None, "the server makes credentials"
    return {
        "key": credentials.access_key_id,
        "secret": credentials.secret_access_key.get_secret_value(),
        "client_kwargs": {"endpoint_url": credentials.endpoint_url},
    }


@dataclass(frozen=True, slots=True)
class Bench:
    """The server behind the relay, and a folder for everything."""

    relay: Relay
    credentials: S3Credentials
    bucket: str
    folder: Path

    def open(self, name: str, cache: str) -> DatasetRoot:
        """A dataset in the bucket, read through a cache of its own."""
        return DatasetRoot.open(f"{self.bucket}/{name}", self.credentials, self.folder / cache)

    def timed(self, what: str, work: Callable[[], object]) -> dict[str, Any]:
        """A row of the table: seconds, and what went over the network."""
        before, start = self.relay.counts(), time.perf_counter()
        work()
        seconds, after = time.perf_counter() - start, self.relay.counts()
        sent, received = ((late - early) / 1e6 for early, late in zip(before, after, strict=True))
        return {
            "what": what,
            "seconds": round(seconds, 3),
            "MB sent": round(sent, 2),
            "MB received": round(received, 2),
            "times faster": "",
            "times fewer bytes": "",
        }


def compare(bench: Bench, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    rows, num_new = arguments.gb * 1e9 / BYTES_PER_ROW / arguments.shards, round(arguments.shards * arguments.share)
    per_shard, folder = max(1, int(rows)), bench.folder
    root = bench.open("train", "cache")
    old = make_shards(folder / "old", arguments.shards, per_shard)
    send(root, old)
    merge(root, old, "old", folder / "work")
    shutil.rmtree(folder / "old")
    batch = make_shards(folder / "new", max(1, num_new), per_shard, first=arguments.shards * per_shard)
    total = arguments.shards + len(batch)
    theirs = bench.timed(
        "concatenate_datasets + save_to_disk", lambda: rewrite(bench.credentials, root.uri, batch, total)
    )
    current, mirror = root.manifest(), open_mirror(root, None, bench.credentials)
    backup = bench.timed("backup before it (copied by the server)", lambda: backup_version(root, current, mirror))
    fresh = bench.open("train", "empty-cache")  # as on a machine that never saw the dataset
    sending = bench.timed("sending the batch's shards, as they are tokenized", lambda: send(fresh, batch))
    ours = bench.timed("merge", lambda: merge(fresh, batch, "new", folder / "work"))
    both = ours | {name: round(sending[name] + ours[name], 3) for name in ("seconds", "MB sent", "MB received")}
    assert fresh.manifest().counts.num_rows == total * per_shard, "rows were lost"
    yield theirs
    yield ours | ratios(theirs, ours)
    yield sending
    yield both | {"what": "merge and sending"} | ratios(theirs, both)
    yield backup
    for factor in (1, 10):
        yield from _swap(bench, arguments.shards * factor)


def ratios(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """How much less time and how many fewer bytes ours takes."""
    num_bytes = [row["MB sent"] + row["MB received"] for row in (theirs, ours)]
    return {
        "times faster": round(theirs["seconds"] / ours["seconds"], 1),
        "times fewer bytes": round(num_bytes[0] / num_bytes[1], 2),
    }


def _swap(bench: Bench, num_shards: int) -> Iterator[dict[str, Any]]:
    """Merging one tiny shard behind a version of many tiny shards, and publishing alone."""
    root, work = bench.open(f"many-{num_shards}", "cache"), bench.folder / "work"
    many = make_shards(bench.folder / f"many-{num_shards}", num_shards, 1)
    one = make_shards(bench.folder / f"one-{num_shards}", 1, 1, first=10**8)
    send(root, [*many, *one])
    merge(root, many, "many", work)
    swaps: list[float] = []
    row = bench.timed(
        f"merge of a shard into {num_shards} (manifest of {len(root.manifest().to_bytes()) / 1e6:.2f} MB)",
        lambda: swaps.append(merge(root, one, "one", work)),
    )
    yield row
    yield dict.fromkeys(row, "") | {"what": "  of which publishing", "seconds": round(swaps[0], 3)}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start_seaweedfs(folder / "s3", SeaweedConfig(attached=True))
        try:
            with counting_relay(server.ports["s3"]) as relay:
                credentials = server.credentials.model_copy(update={"endpoint_url": f"http://127.0.0.1:{relay.port}"})
                rows = list(compare(Bench(relay, credentials, server.uri, folder), arguments))
        finally:
            stop_seaweedfs(folder / "s3")
    print_table(rows, as_json=arguments.json)
    if not arguments.json:
        print(json.dumps({name: rows[1][name] for name in ("times faster", "times fewer bytes")}))


if __name__ == "__main__":
    main()
