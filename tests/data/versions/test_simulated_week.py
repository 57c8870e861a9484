"""A week of a schedule in seconds: batches arrive by a clock of our own, each is found and merged behind a backup."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from dflash.config import MergeRun, RefreshRun, TokenizeRun
from dflash.data.backup import backup_version, open_mirror
from dflash.data.dataset import DatasetRoot
from dflash.data.discovery import find_batches, mergeable
from dflash.data.verify import verify_dataset
from dflash.manifest import Manifest
from dflash.storage import LocalStore, open_store
from tests.data.versions.named_batches import publish

HOUR = 3600.0
START = 1_800_000_000.0
NUM_BATCHES, NUM_HOURS, EVERY_HOURS = 50, 168, 2
ROWS = 4


class Arrivals:
    """Batch folders that are written file by file over some hours of the week; half of them end with `_SUCCESS`."""

    def __init__(self, completions: LocalStore, seed: int) -> None:
        g = random.Random(seed)
        self._completions = completions
        self._files: list[tuple[float, str]] = []
        for number in range(NUM_BATCHES):
            begin = START + g.uniform(number, number + 2) * (NUM_HOURS - 12) / NUM_BATCHES * HOUR
            times = sorted(begin + g.uniform(0, 4) * HOUR for _ in range(3))
            self._files += [(time, f"batch-{number:03d}/part-{part}.jsonl") for part, time in enumerate(times)]
            if g.random() < 0.5:
                self._files.append((times[-1] + 60, f"batch-{number:03d}/_SUCCESS"))

    def write_until(self, now: float) -> None:
        due = [item for item in self._files if item[0] <= now]
        self._files = [item for item in self._files if item[0] > now]
        for time, key in due:
            path = self._completions.root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"" if key.endswith("_SUCCESS") else b'{"made": true}\n')
            os.utime(path, (time, time))


def stored(uri: str) -> dict[str, int]:
    """Bytes below a place, by what they are."""
    sizes: dict[str, int] = {}
    for path in Path(uri).rglob("*"):
        if path.is_file():
            kind = path.relative_to(uri).parts[0]
            sizes[kind] = sizes.get(kind, 0) + path.stat().st_size
    return sizes


def merge_found(sandbox: Any, sample: Any, completions: LocalStore, name: str) -> None:
    """What the flow does with a batch that was found: back up the current version, then merge."""
    current = sandbox.root.current()
    if current is not None:
        backup_version(sandbox.root, current, open_mirror(sandbox.root, None))
    number = int(name.removeprefix("batch-"))
    publish(sandbox, sample, completions, name, number * ROWS, num_rows=ROWS)


def history(root: DatasetRoot) -> list[Manifest]:
    """Every version, the current one first, along the chain of parents."""
    chain = [root.current()]
    while chain[-1] is not None and chain[-1].parent is not None:
        chain.append(root.manifest(chain[-1].parent))
    return [manifest for manifest in chain if manifest is not None]


@pytest.mark.slow
def test_each_batch_of_a_week_is_merged_once_and_storage_grows_by_what_it_adds(
    sandbox: Any, sample: Any, tmp_path: Path
) -> None:
    completions = open_store(str(tmp_path / "completions"))
    assert isinstance(completions, LocalStore)
    completions.root.mkdir()
    arrivals = Arrivals(completions, seed=1)
    run = RefreshRun(merge=MergeRun(batch=TokenizeRun(source=completions.uri, dataset=sandbox.root.uri, tokenizer="t")))
    merged: list[str] = []
    growth: list[int] = []
    for hour in range(0, NUM_HOURS + EVERY_HOURS, EVERY_HOURS):
        now = START + hour * HOUR
        arrivals.write_until(now)
        while todo := mergeable(find_batches(completions, sandbox.root, run, now)):
            merge_found(sandbox, sample, completions, todo[0].name)
            merged.append(todo[0].name)
            growth.append(stored(sandbox.root.uri)["manifests"])

    names = [f"batch-{number:03d}" for number in range(NUM_BATCHES)]
    assert sorted(merged) == names
    assert merged != names  # a batch that began late is merged when it is there

    versions = history(sandbox.root)
    assert [manifest.version for manifest in versions] == list(range(NUM_BATCHES, 0, -1))
    for newer, older in itertools.pairwise(versions):
        assert newer.shards[: len(older.shards)] == older.shards
        assert [batch.source for batch in newer.batches[:-1]] == [batch.source for batch in older.batches]
    current = versions[0]
    assert [batch.source.rstrip("/").rsplit("/", 1)[-1] for batch in current.batches] == merged
    assert current.counts.num_rows == NUM_BATCHES * ROWS
    assert verify_dataset(sandbox.root, current).problems == ()

    # Shards are stored once in the root and once in the backup, whatever the number of versions.
    root, backup = stored(sandbox.root.uri), stored(f"{sandbox.root.uri}.backups")
    assert root["shards"] == sum(entry.num_bytes for entry in current.shards)
    assert backup["shards"] == sum(entry.num_bytes for entry in versions[1].shards)
    # A version's manifest grows by its batch; those of all versions are what history costs.
    steps = [after - before for before, after in itertools.pairwise(growth)]
    assert max(second - first for first, second in itertools.pairwise(steps)) < 2_000
    assert verify_dataset(open_mirror(sandbox.root, None), versions[1]).problems == ()
