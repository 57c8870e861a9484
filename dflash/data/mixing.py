"""Which rows of a new batch are taken: caps, weights and a total, drawn by a hash of seed and sample id.

Each row gets a number from its id and the seed, and the lowest numbers are taken. So a draw doesn't depend on the order
of rows, and a larger draw with the same seed holds the smaller one. Weights divide the exponential of that number,
which draws without replacement in proportion to them (Efraimidis and Spirakis, 2006).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.config import MixOptions
from dflash.data.mix import mix_of
from dflash.errors import UsageError

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows that are taken.

    Attributes:
        taken: bool [rows of the batch].
        available: rows that could be taken, by source.
        drawn: rows that are, by source.
    """

    taken: BoolArray
    available: dict[str, int]
    drawn: dict[str, int]

    def to_json(self, options: MixOptions) -> dict[str, Any]:
        """What the manifest's notes keep: options (with the seed) and counts."""
        return {"options": options.model_dump(mode="json"), "available": self.available, "drawn": self.drawn}


def draw_rows(index: pa.Table, eligible: BoolArray, options: MixOptions) -> Draw:
    """Decide which rows of a batch are taken.

    Args:
        index: the batch's index rows with `sample_id` and `source`.
        eligible: bool [rows], false where a row is out already, as a duplicate.
        options: total, caps, weights, seed.

    Raises:
        UsageError: a source with a cap or weight isn't in the batch; names those there are.
    """
    sources = index["source"].combine_chunks()
    present = mix_of(index["source"])
    _check_names({*options.source_caps, *options.source_weights}, set(sources.unique().to_pylist()), present)
    rows = np.flatnonzero(eligible)
    names = sources.take(pa.array(rows)).to_pylist()
    uniform = _uniform(options.seed, index["sample_id"].take(pa.array(rows)).to_pylist())
    weights = np.array([options.source_weights.get(name, 1.0) for name in names], np.float64)
    possible = weights > 0
    with np.errstate(divide="ignore"):
        rank = np.where(possible, -np.log(uniform) / weights, np.inf)
    order = np.argsort(rank, kind="stable")
    order = order[possible[order]]
    order = _apply_caps(order, names, options.source_caps)
    if options.max_samples is not None:
        order = order[: options.max_samples]
    taken = np.zeros(len(eligible), np.bool_)
    taken[rows[order]] = True
    return Draw(
        taken, mix_of(index["source"].filter(pa.array(eligible))), mix_of(index["source"].filter(pa.array(taken)))
    )


def _uniform(seed: int, sample_ids: Iterable[str]) -> npt.NDArray[np.float64]:
    """A number above 0 and at most 1 for each id."""
    key = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    digests = b"".join(
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest() for name in sample_ids
    )
    numbers = np.frombuffer(digests, "<u8") >> np.uint64(11)
    uniform: npt.NDArray[np.float64] = (numbers.astype(np.float64) + 1) / 2**53
    return uniform


def _apply_caps(order: npt.NDArray[np.int64], names: list[str], caps: dict[str, int]) -> npt.NDArray[np.int64]:
    """Drop, in rank order, what is over the cap of its source."""
    if not caps:
        return order
    left = dict(caps)
    kept = []
    for row in order.tolist():
        name = names[row]
        if name in left:
            if left[name] == 0:
                continue
            left[name] -= 1
        kept.append(row)
    return np.array(kept, np.int64)


def _check_names(named: set[str], present: set[str], counts: dict[str, int]) -> None:
    unknown = sorted(named - present)
    if unknown:
        known = ", ".join(f"{name or '(none)'} {count}" for name, count in list(counts.items())[:20])
        raise UsageError(
            f"mix names sources that the batch doesn't have: {', '.join(unknown)}. Its sources and rows: {known}."
        )
