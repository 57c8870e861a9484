"""Verify a whole dataset version: every row of every shard, and every object that it needs or that nothing names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from dflash.data.dataset import INFO_KEY, POINTER_KEY, DatasetRoot, Pointer
from dflash.data.saved_format import dataset_info, datasets_state
from dflash.data.verify_shard import Problem, verify_shard
from dflash.errors import DatasetError, ObjectNotFoundError, StorageError
from dflash.manifest import Manifest, ShardEntry
from dflash.storage import Store

__all__ = ["Problem", "VerifyReport", "verify_dataset", "verify_shard"]

NUM_THREADS: Final = 4  # hashing and reading release the interpreter's lock


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What re-reading a version found.

    Attributes:
        problems: differences from the manifest; none in a sound version.
        unreferenced: objects that no published version names, such as those of a run that was killed. They are no
            damage and cost space alone.
    """

    dataset: str
    version: str
    num_shards: int
    num_rows: int
    num_tokens: int
    problems: tuple[Problem, ...]
    unreferenced: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "problems": [asdict(item) for item in self.problems], "sound": not self.problems}

    def describe(self) -> str:
        """For people: what is damaged and what to do, or that all is sound."""
        checked = f"{self.num_shards:,} shards, {self.num_rows:,} rows, {self.num_tokens:,} tokens"
        if not self.problems:
            unused = f"{len(self.unreferenced)} objects unreferenced"
            return f"{self.dataset} {self.version} is sound: {checked} read, {unused}."
        lines = [f"{self.dataset} {self.version} is damaged: {len(self.problems)} differences in {checked}."]
        lines += [f"  {problem}" for problem in self.problems]
        lines.append(
            "Restore the version from its backup with `dflash restore`, or remove the damaged objects and tokenize "
            "the batch again: only what is missing is made."
        )
        return "\n".join(lines)


def verify_dataset(root: DatasetRoot, manifest: Manifest) -> VerifyReport:
    """Re-read everything that a version needs.

    Shards are read from the store itself, never from a cache, one after another per thread: memory and disk hold a
    few at a time.

    Raises:
        DatasetError: the pointer itself is damaged.
    """
    pointer = root.pointer()
    problems = list(_verify_pointer(root, manifest, pointer))
    verify = partial(_verify_entry, root, manifest.tokenizer.vocab_size)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for found in threads.map(verify, manifest.shards):
            problems += found
    named, unreadable = _named_objects(root, manifest, pointer)
    problems += unreadable
    problems += _missing_rejects(root, manifest)
    return VerifyReport(
        dataset=root.uri,
        version=manifest.name,
        num_shards=manifest.counts.num_shards,
        num_rows=manifest.counts.num_rows,
        num_tokens=manifest.counts.num_tokens,
        problems=tuple(problems),
        unreferenced=tuple(_unreferenced(root, named)),
    )


def _verify_pointer(root: DatasetRoot, manifest: Manifest, pointer: Pointer | None) -> Iterator[Problem]:
    """What `load_from_disk` reads: the description, and the current version's list of files."""
    try:
        info = root.store.read(INFO_KEY)
        state = json.loads(root.store.read(POINTER_KEY))
    except StorageError as error:
        yield Problem("the root", f"{INFO_KEY} and {POINTER_KEY}", str(error))
        return
    if info != dataset_info():
        yield Problem(INFO_KEY, "the features of the schema", "another description")
    if pointer is not None and pointer.record.manifest == manifest.name:
        expected = datasets_state(manifest)
        differing = sorted(key for key, value in expected.items() if state.get(key) != value)
        if differing:
            yield Problem(POINTER_KEY, f"what {manifest.name} says", f"other values of {', '.join(differing)}")


def _verify_entry(root: DatasetRoot, vocab_size: int, entry: ShardEntry) -> list[Problem]:
    root.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=root.cache) as folder:
        shard = _as_file(root.store, entry.key, Path(folder) / "shard.arrow")
        index = _as_file(root.meta, entry.index_key, Path(folder) / "index.arrow")
        problems = [item for item in (shard, index) if isinstance(item, Problem)]
        if isinstance(shard, Problem):
            return problems
        index_path = None if isinstance(index, Problem) else index
        return problems + verify_shard(shard, entry, index_path=index_path, vocab_size=vocab_size)


def _as_file(store: Store, key: str, path: Path) -> Path | Problem:
    """The object itself if it is a file already, else a copy."""
    local = store.local_path(key)
    if local is not None:
        return local if local.is_file() else Problem(key, "in the store", "missing")
    try:
        store.download(key, path)
    except ObjectNotFoundError:
        return Problem(key, "in the store", "missing")
    except StorageError as error:
        return Problem(key, "a readable object", str(error))
    return path


def _named_objects(root: DatasetRoot, manifest: Manifest, pointer: Pointer | None) -> tuple[set[str], list[Problem]]:
    """Keys that any published version names, each with the store's part of it; versions that can't be read."""
    manifests, problems = {manifest.name: manifest}, []
    for move in pointer.record.history if pointer else ():
        if move.manifest not in manifests:
            try:
                manifests[move.manifest] = root.manifest(move.manifest)
            except (StorageError, DatasetError) as error:
                problems.append(Problem(f"manifests/{move.manifest}.json", "a readable manifest", str(error)))
    named = {f"manifests/{name}.json" for name in manifests}
    for version in manifests.values():
        named |= {key for entry in version.shards for key in (entry.key, entry.index_key)}
    return named, problems


def _missing_rejects(root: DatasetRoot, manifest: Manifest) -> list[Problem]:
    stored = {item.key for item in root.meta.list("rejects")}
    keys = [f"rejects/{sha256}.jsonl" for batch in manifest.batches for sha256 in batch.rejects]
    return [Problem(key, "in the store", "missing") for key in keys if key not in stored]


def _unreferenced(root: DatasetRoot, named: set[str]) -> Iterator[str]:
    for store, prefix in ((root.store, "manifests"), (root.store, "shards"), (root.meta, "index")):
        for item in store.list(prefix):
            if item.key not in named:
                yield f"{store.uri}/{item.key}"
