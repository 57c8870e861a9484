"""Decide which rows make the next version, from manifests and indexes alone; changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.config import DuplicatePolicy, MixOptions
from dflash.data.compatibility import Recipe, check_compatible
from dflash.data.dataset import DatasetRoot, Pointer
from dflash.data.duplicates import find_duplicates
from dflash.data.mixing import draw_rows
from dflash.data.shard_files import ShardFiles
from dflash.data.shards import INDEX_SCHEMA, read_index
from dflash.data.without_pandas import to_numpy
from dflash.errors import DamagedDatasetError
from dflash.manifest import Batch, Manifest, ShardEntry

BoolArray = npt.NDArray[np.bool_]
READS_AT_ONCE: Final = 16  # indexes that are fetched together
PLAN_COLUMNS: Final = ("sample_id", "content_hash", "source", "num_tokens")


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A tokenized and judged batch.

    Attributes:
        recipe: what made its rows.
        batch: its record for the manifest.
        shards: its shards in order.
        quality: the gate's report as JSON.
        gate_override_reason: why a batch that failed the gate is let through.
    """

    recipe: Recipe
    batch: Batch
    shards: tuple[ShardEntry, ...]
    quality: dict[str, Any]
    gate_override_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """A shard and which of its rows stay; `keep` is None where all do."""

    entry: ShardEntry
    keep: BoolArray | None

    @property
    def is_empty(self) -> bool:
        """Whether no row stays."""
        return self.keep is not None and not self.keep.any()


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge will do, decided from manifests and indexes.

    Attributes:
        pointer: the pointer that was read, which publishing expects.
        current: the manifest that it names.
        version: number of the new version: one more than any that was ever published.
        new: the batch.
        old_cuts, new_cuts: the shards in order.
        dropped_rows, dropped_tokens: of both sides together.
        notes: what the manifest keeps about duplicates and draw.
        already_merged: the current version holds the batch; there is nothing to do.
    """

    pointer: Pointer | None
    current: Manifest | None
    version: int
    new: NewBatch
    old_cuts: tuple[Cut, ...] = ()
    new_cuts: tuple[Cut, ...] = ()
    dropped_rows: int = 0
    dropped_tokens: int = 0
    notes: dict[str, Any] | None = None
    already_merged: bool = False

    def rewrites(self) -> list[Cut]:
        """Shards that are written anew."""
        return [cut for cut in (*self.old_cuts, *self.new_cuts) if cut.keep is not None and not cut.is_empty]

    def old_rewrites(self) -> list[Cut]:
        """Those of them that lie on the store already, because the current version holds them."""
        return [cut for cut in self.old_cuts if cut.keep is not None and not cut.is_empty]

    def as_they_are(self) -> set[str]:
        """Fingerprints of the batch's shards that are kept whole."""
        return {cut.entry.fingerprint for cut in self.new_cuts if cut.keep is None}


# Given the batch's shards and the rows that are still in, says which go, and what the notes keep.
Screen = Callable[[Sequence[ShardEntry], BoolArray], tuple[BoolArray, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class MergeRules:
    """How rows are chosen: duplicates, then the optional screen, then the draw."""

    duplicates: DuplicatePolicy = "error"
    mix: MixOptions = field(default_factory=MixOptions)
    screen: Screen | None = None


def holds_batch(current: Manifest | None, fingerprint: str) -> bool:
    """Whether a version holds a batch with this fingerprint."""
    return current is not None and any(batch.fingerprint == fingerprint for batch in current.batches)


def plan_merge(root: DatasetRoot, new: NewBatch, rules: MergeRules, files: ShardFiles) -> MergePlan:
    """Read the pointer and all indexes, and decide which rows make the next version. Changes nothing.

    Raises:
        IncompatibleError: other tokenizer, template, options or schema; or duplicates under the policy `error`.
        DamagedDatasetError: an index doesn't describe its shard.
    """
    pointer = root.pointer()
    current = None if pointer is None else root.manifest_of(pointer.record)
    version = 1 if pointer is None else max(move.version for move in pointer.record.history) + 1
    if holds_batch(current, new.batch.fingerprint):
        return MergePlan(pointer, current, version, new, already_merged=True)
    if current is not None:
        check_compatible(current, new.recipe)
    old_shards = () if current is None else current.shards
    old = read_indexes(old_shards, files)
    index = read_indexes(new.shards, files)
    found = find_duplicates(old, index, rules.duplicates)
    stays = ~found.drop_new
    notes: dict[str, Any] = {"policy": rules.duplicates, "duplicates": found.to_json()}
    if rules.screen is not None:
        dropped, notes["screen"] = rules.screen(new.shards, stays)
        stays &= ~dropped
    if not rules.mix.takes_all:
        draw = draw_rows(index, stays, rules.mix)
        stays, notes["mix"] = draw.taken, draw.to_json(rules.mix)
    stays_old = ~found.drop_old
    return MergePlan(
        pointer,
        current,
        version,
        new,
        old_cuts=_cuts(old_shards, stays_old),
        new_cuts=_cuts(new.shards, stays),
        dropped_rows=int((~stays_old).sum() + (~stays).sum()),
        dropped_tokens=_tokens(old, ~stays_old) + _tokens(index, ~stays),
        notes=notes | {"rows_before": old.num_rows, "rows_of_batch": index.num_rows, "rows_taken": int(stays.sum())},
    )


def read_indexes(shards: Sequence[ShardEntry], files: ShardFiles) -> pa.Table:
    """The columns that planning needs, of all shards in order.

    Raises:
        DamagedDatasetError: an index has other numbers of rows or tokens than its entry says.
    """
    with ThreadPoolExecutor(READS_AT_ONCE) as threads:
        tables = list(threads.map(lambda entry: _read_index(entry, files.index(entry)), shards))
    return pa.concat_tables(tables) if tables else INDEX_SCHEMA.empty_table().select(PLAN_COLUMNS)


def _read_index(entry: ShardEntry, path: Path) -> pa.Table:
    table = read_index(path).select(PLAN_COLUMNS)
    found = (table.num_rows, _tokens(table, np.ones(table.num_rows, np.bool_)))
    if found != (entry.num_rows, entry.num_tokens):
        raise DamagedDatasetError(
            f"{entry.index_key} doesn't describe its shard {entry.key}: expected {entry.num_rows} rows with "
            f"{entry.num_tokens} tokens, found {found[0]} with {found[1]}. Run `dflash verify` and restore the "
            "version from a backup."
        )
    return table


def _cuts(shards: Sequence[ShardEntry], stays: BoolArray) -> tuple[Cut, ...]:
    bounds = [0, *itertools.accumulate(entry.num_rows for entry in shards)]
    parts = [stays[start:end] for start, end in itertools.pairwise(bounds)]
    return tuple(Cut(entry, None if part.all() else part) for entry, part in zip(shards, parts, strict=True))


def _tokens(index: pa.Table, rows: BoolArray) -> int:
    return int(to_numpy(index["num_tokens"])[rows].sum(dtype=np.int64))
