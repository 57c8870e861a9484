"""The mix of sources and scripts of a batch, and how far it lies from that of the current version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import pyarrow as pa

MAX_NAMES: Final = 1000  # a source may be a URL of its own in every record
MAX_NAME_CHARS: Final = 200
OTHER: Final = "(other)"


def mix_shift(new: Mapping[str, int], old: Mapping[str, int]) -> float | None:
    """Total variation distance, less its expectation for a sample of this size from `old`; `None` without both."""
    total_new, total_old = sum(new.values()), sum(old.values())
    if not total_new or not total_old:
        return None
    if OTHER in new or OTHER in old:  # one side is cut to its largest names: compare those that both have
        both = new.keys() & old.keys()
        new, old = _fold(new, both), _fold(old, both)
    names = sorted({*new, *old})
    p_new = np.array([new.get(name, 0) for name in names]) / total_new
    p_old = np.array([old.get(name, 0) for name in names]) / total_old
    by_chance = 0.5 * np.sqrt(2 * p_old * (1 - p_old) / (np.pi * total_new)).sum()
    return round(max(0.0, float(0.5 * np.abs(p_new - p_old).sum() - by_chance)), 6)


def _fold(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    kept = {name: counts[name] for name in names if name != OTHER}
    return {**kept, OTHER: sum(counts.values()) - sum(kept.values())}


def mix_of(column: pa.ChunkedArray) -> dict[str, int]:
    """Rows by name (string column), sorted; all but the largest thousand names together as `(other)`."""
    counts: dict[str, int] = {}
    for entry in column.value_counts().to_pylist():
        name = entry["values"][:MAX_NAME_CHARS]
        counts[name] = counts.get(name, 0) + entry["counts"]
    if len(counts) > MAX_NAMES:
        largest = sorted(counts, key=lambda name: (-counts[name], name))[:MAX_NAMES]
        counts = _fold(counts, largest)
    return dict(sorted(counts.items()))
