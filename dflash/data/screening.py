"""Optional looks at the content of a new batch: near duplicates inside it, and runs of tokens of evaluation prompts.

Both work on token ids. The prompts of an evaluation are encoded by the same tokenizer, so a shared text is a shared run
of ids but for a token or two at its edges; decoding 193,000 rows to compare words would take minutes of every core.
Near duplicates are looked for inside the batch only, because the tokens of old rows aren't read when merging.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dflash.config import ScreenOptions
from dflash.data.evaluation_prompts import read_prompts
from dflash.data.merge_plan import BoolArray, Screen
from dflash.data.rewrite import flat_ids
from dflash.data.shard_files import ShardFiles
from dflash.data.shards import read_batches
from dflash.data.tokenizer import TargetTokenizer
from dflash.errors import UsageError
from dflash.manifest import ShardEntry
from dflash.storage import S3Credentials, open_store

NUM_PERMUTATIONS: Final = 128
SHINGLE_TOKENS: Final = 5
Ids = npt.NDArray[np.int32]
# Odd base of the polynomial hash of a run; products wrap around at 2^64.
_BASE: Final = np.uint64(0x9E3779B97F4A7C15)


def make_screen(
    options: ScreenOptions, files: ShardFiles, tokenizer: TargetTokenizer, credentials: S3Credentials | None
) -> Screen | None:
    """Build what `plan_merge` calls; None where nothing is to be looked at. Evaluation prompts are read here.

    Raises:
        UsageError: the library for near duplicates isn't installed, or there are no evaluation prompts.
    """
    looks: dict[str, tuple[bool, _Look]] = {}
    if options.contamination != "off":
        assert options.evaluation_prompts is not None, "the options say so"
        prompts = read_prompts(open_store(options.evaluation_prompts, credentials))
        encoded = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in prompts]
        looks["contamination"] = (options.contamination == "drop", SharedRuns.of(encoded, options.ngram_tokens))
    if options.near_duplicates != "off":
        near = NearDuplicates(options.min_similarity, keep_found=options.near_duplicates == "report")
        looks["near_duplicates"] = (options.near_duplicates == "drop", near)
    if not looks:
        return None

    def screen(shards: Sequence[ShardEntry], stays: BoolArray) -> tuple[BoolArray, dict[str, Any]]:
        found = {name: np.zeros(len(stays), np.bool_) for name in looks}
        dropped = np.zeros(len(stays), np.bool_)
        for row, ids in _rows(shards, files):
            if not stays[row]:
                continue
            for name, (drops, look) in looks.items():
                if not dropped[row] and look.finds(ids):
                    found[name][row] = True
                    dropped[row] = drops
        notes = {"options": options.model_dump(mode="json"), "found": {n: int(f.sum()) for n, f in found.items()}}
        return dropped, notes | {"dropped": int(dropped.sum())}

    return screen


def _rows(shards: Sequence[ShardEntry], files: ShardFiles) -> Iterator[tuple[int, Ids]]:
    row = 0
    for entry in shards:
        for batch in read_batches(files.shard(entry)):
            ids, offsets = flat_ids(batch)
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                yield row, ids[start:end]
                row += 1


class _Look:
    """One question about a row, asked in order."""

    def finds(self, ids: Ids) -> bool:
        """Whether the row is one of those that are looked for."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SharedRuns(_Look):
    """Rows that share a run of `length` tokens with any of the given texts; texts that are shorter have none.

    Attributes:
        hashes: uint64, sorted, of all runs.
        runs: the runs as bytes, which decide.
    """

    length: int
    hashes: npt.NDArray[np.uint64]
    runs: frozenset[bytes]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], length: int) -> SharedRuns:
        """Take all runs of the encoded texts."""
        arrays = [np.array(text, np.int32) for text in texts if len(text) >= length]
        runs = frozenset(
            array[start : start + length].tobytes() for array in arrays for start in range(len(array) - length + 1)
        )
        hashes = [run_hashes(array, length) for array in arrays]
        return cls(length, np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64), runs)

    def finds(self, ids: Ids) -> bool:
        """Whether any run of the row is one of these."""
        if not len(self.hashes) or len(ids) < self.length:
            return False
        hashes = run_hashes(ids, self.length)
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        hits = np.flatnonzero(self.hashes[places] == hashes).tolist()
        return any(ids[hit : hit + self.length].tobytes() in self.runs for hit in hits)


def run_hashes(ids: Ids, length: int) -> npt.NDArray[np.uint64]:
    """Polynomial hash of every run of `length` ids: [n] to [max(n - length + 1, 0)]."""
    count = max(len(ids) - length + 1, 0)
    values = ids.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(count, np.uint64)
    for place in range(length):
        hashes *= _BASE
        hashes += values[place : place + count]
    return hashes


class NearDuplicates(_Look):
    """Rows whose sets of short runs nearly equal those of an earlier row, by MinHash and locality-sensitive hashing."""

    def __init__(self, min_similarity: float, *, keep_found: bool) -> None:
        try:
            sketch = importlib.import_module("datasketch")
        except ImportError as error:
            raise UsageError(
                "Looking for near duplicates needs datasketch. Install the extra: pip install 'dflash-pipeline[dedup]'."
            ) from error
        self._min_similarity = min_similarity
        self._keep_found = keep_found
        self._empty = sketch.MinHash(num_perm=NUM_PERMUTATIONS, hashfunc=int)
        self._known = sketch.MinHashLSH(threshold=min_similarity, num_perm=NUM_PERMUTATIONS)
        self._sketches: list[Any] = []

    def finds(self, ids: Ids) -> bool:
        """Whether the row nearly repeats an earlier one; rows that are dropped aren't compared with later ones."""
        hashes = run_hashes(ids, min(SHINGLE_TOKENS, len(ids)))
        sketch = self._empty.copy()
        sketch.update_batch(np.unique(hashes >> np.uint64(32)).tolist())
        found = any(
            sketch.jaccard(self._sketches[other]) >= self._min_similarity for other in self._known.query(sketch)
        )
        if self._keep_found or not found:
            self._known.insert(len(self._sketches), sketch)
            self._sketches.append(sketch)
        return found
