"""The mix of sources and scripts of a batch, and how far it lies from that of the current version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_NAMES: Final = 1000  # a source may be a URL of its own in every record
MAX_NAME_CHARS: Final = 200
MAX_COUNTED_AT_ONCE: Final = 50_000
OTHER: Final = "(other)"


def mix_shift(new: Mapping[str, int], old: Mapping[str, int]) -> float | None:
    """Total variation distance, less its expectation for a sample of this size from `old`; `None` without both."""
    total_new, total_old = sum(new.values()), sum(old.values())
    if not total_new or not total_old:
        return None
    if OTHER in new or OTHER in old:  # one side is cut to its largest names: compare those that both have
        both = new.keys() & old.keys()
        new, old = (_fold({name: mix[name] for name in both}, sum(mix.values())) for mix in (new, old))
    names = sorted({*new, *old})
    p_new = np.array([new.get(name, 0) for name in names]) / total_new
    p_old = np.array([old.get(name, 0) for name in names]) / total_old
    by_chance = 0.5 * np.sqrt(2 * p_old * (1 - p_old) / (np.pi * total_new)).sum()
    return round(max(0.0, float(0.5 * np.abs(p_new - p_old).sum() - by_chance)), 6)


def _fold(kept: Mapping[str, int], num_rows: int) -> dict[str, int]:
    """Put what isn't kept of all rows together, with what bears that name already."""
    named = {name: count for name, count in kept.items() if name != OTHER}
    return {**named, OTHER: num_rows - sum(named.values())}


def mix_of(column: pa.ChunkedArray) -> dict[str, int]:
    """Rows by name (string column), sorted; all but the largest thousand names together as `(other)`."""
    counts: Counter[str] = Counter()
    for name, count in _count(column):
        counts[name] += count
    return _finish(counts, counts.total())


def mix_of_tables(tables: Iterable[pa.Table], column: str) -> dict[str, int]:
    """As `mix_of` over a string column of many tables behind one another; null counts as "".

    The memory is bounded whatever the number of names: where they are too many, they are counted one part of them
    after another.

    Args:
        tables: iterated once for each part, one table at a time.
        column: its name.
    """
    num_parts = 1
    while (mix := _mix_in_parts(tables, column, num_parts)) is None:
        num_parts *= 8
    return mix


def _mix_in_parts(tables: Iterable[pa.Table], column: str, num_parts: int) -> dict[str, int] | None:
    """The mix, of which each part holds the names of some hashes; None where a part has too many names."""
    largest: dict[str, int] = {}
    num_rows = 0
    for part in range(num_parts):
        counts: Counter[str] = Counter()
        for table in tables:
            for name, count in _count(pc.fill_null(table[column], "")):
                if hash(name) % num_parts == part:
                    counts[name] += count
            if len(counts) > MAX_COUNTED_AT_ONCE:
                return None
        num_rows += counts.total()
        # One more than are kept tells that there are more.
        largest = _largest(largest | counts, MAX_NAMES + 1)
    return _finish(largest, num_rows)


def _count(column: pa.ChunkedArray) -> Iterator[tuple[str, int]]:
    for entry in column.value_counts().to_pylist():
        yield entry["values"][:MAX_NAME_CHARS], entry["counts"]


def _largest(counts: Mapping[str, int], num_names: int) -> dict[str, int]:
    names = sorted(counts, key=lambda name: (-counts[name], name))[:num_names]
    return {name: counts[name] for name in names}


def _finish(counts: Mapping[str, int], num_rows: int) -> dict[str, int]:
    if len(counts) > MAX_NAMES:
        counts = _fold(_largest(counts, MAX_NAMES), num_rows)
    return dict(sorted(counts.items()))
