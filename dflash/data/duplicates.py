"""Exact duplicates between a new batch and the version it is merged into, and inside the batch, from the indexes.

Two rows are duplicates when they have one sample id or one content hash. Rows that were merged earlier are never judged
against each other: what a version holds was decided when it was published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash.config import DuplicatePolicy
from dflash.data.without_pandas import to_numpy
from dflash.errors import IncompatibleError

BoolArray = npt.NDArray[np.bool_]
KEY_COLUMNS: Final = ("sample_id", "content_hash")
MAX_EXAMPLES: Final = 10
MAX_EXAMPLE_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Which rows go.

    Attributes:
        drop_old: bool [old rows].
        drop_new: bool [new rows].
        num_by_id: new rows whose id is in the version or earlier in the batch.
        num_by_content: new rows whose ids sequence is.
        num_in_batch: new rows that repeat another new row by either.
        examples: sample ids of some new rows that repeat another.
    """

    drop_old: BoolArray
    drop_new: BoolArray
    num_by_id: int
    num_by_content: int
    num_in_batch: int
    examples: tuple[str, ...]

    @property
    def num_dropped(self) -> int:
        """Rows that go, old and new."""
        return int(self.drop_old.sum() + self.drop_new.sum())

    def to_json(self) -> dict[str, Any]:
        """Counts for the report and the manifest's notes."""
        return {
            "by_id": self.num_by_id,
            "by_content": self.num_by_content,
            "inside_the_batch": self.num_in_batch,
            "dropped_old": int(self.drop_old.sum()),
            "dropped_new": int(self.drop_new.sum()),
        }


def find_duplicates(old: pa.Table, new: pa.Table, policy: DuplicatePolicy) -> Duplicates:
    """Compare a batch with a version, by id and by content.

    Args:
        old: index rows of the version, with at least `KEY_COLUMNS`.
        new: index rows of the batch.
        policy: `error` refuses the batch; `keep_old` drops new rows that are there already, and of equal new rows all
            but the first; `keep_new` drops old rows that come again, and of equal new rows all but the last.

    Raises:
        IncompatibleError: there are duplicates and the policy is `error`; counts them and names some.
    """
    keys = [_Key.of(old, new, name) for name in KEY_COLUMNS]
    repeats = [key.in_old[key.new] | key.repeats_earlier for key in keys]
    either = repeats[0] | repeats[1]
    found = Duplicates(
        drop_old=np.zeros(old.num_rows, np.bool_),
        drop_new=np.zeros(new.num_rows, np.bool_),
        num_by_id=int(repeats[0].sum()),
        num_by_content=int(repeats[1].sum()),
        num_in_batch=int((keys[0].repeats_earlier | keys[1].repeats_earlier).sum()),
        examples=_examples(new, either),
    )
    if policy == "error":
        if either.any():
            raise IncompatibleError(_refusal(found, int(either.sum()), new.num_rows))
    elif policy == "keep_old":
        known = keys[0].in_old[keys[0].new] | keys[1].in_old[keys[1].new]
        found.drop_new[:] = known | ~_first_of_equals(keys, ~known, reverse=False)
    else:
        kept = _first_of_equals(keys, np.ones(new.num_rows, np.bool_), reverse=True)
        found.drop_new[:] = ~kept
        found.drop_old[:] = keys[0].comes_again(kept) | keys[1].comes_again(kept)
    return found


@dataclass(frozen=True, slots=True)
class _Key:
    """One key column of both sides as small integers that are equal where the keys are.

    `in_old` and `num_new` are by code: whether an old row has it, and how many new rows do.
    """

    old: npt.NDArray[np.int64]
    new: npt.NDArray[np.int64]
    in_old: BoolArray
    num_new: npt.NDArray[np.int64]

    @classmethod
    def of(cls, old: pa.Table, new: pa.Table, name: str) -> _Key:
        both = pa.concat_tables([old.select([name]), new.select([name])])[name]
        encoded = both.combine_chunks().dictionary_encode()
        codes: npt.NDArray[np.int64] = to_numpy(encoded.indices).astype(np.int64)
        num_codes = len(encoded.dictionary)
        old_codes, new_codes = codes[: old.num_rows], codes[old.num_rows :]
        in_old = np.zeros(num_codes, np.bool_)
        in_old[old_codes] = True
        return cls(old_codes, new_codes, in_old, np.bincount(new_codes, minlength=num_codes))

    @property
    def repeats_earlier(self) -> BoolArray:
        """New rows whose key an earlier new row has."""
        later = np.ones(len(self.new), np.bool_)
        later[np.unique(self.new, return_index=True)[1]] = False
        return later

    def comes_again(self, kept: BoolArray) -> BoolArray:
        """Old rows whose key a kept new row has."""
        again = np.zeros(len(self.in_old), np.bool_)
        again[self.new[kept]] = True
        rows: BoolArray = again[self.old]
        return rows


def _first_of_equals(keys: Sequence[_Key], candidates: BoolArray, *, reverse: bool) -> BoolArray:
    """Candidates less those that share a key with a candidate taken before them, in order or from the end.

    One row at a time, because whether a row is taken decides over later ones; but only rows whose key occurs twice.
    """
    taken = candidates.copy()
    unsure = np.flatnonzero(candidates & ((keys[0].num_new[keys[0].new] > 1) | (keys[1].num_new[keys[1].new] > 1)))
    seen: tuple[set[int], set[int]] = (set(), set())
    for row in reversed(unsure.tolist()) if reverse else unsure.tolist():
        pair = (int(keys[0].new[row]), int(keys[1].new[row]))
        if pair[0] in seen[0] or pair[1] in seen[1]:
            taken[row] = False
        else:
            seen[0].add(pair[0])
            seen[1].add(pair[1])
    return taken


def _examples(new: pa.Table, rows: BoolArray) -> tuple[str, ...]:
    numbers = np.flatnonzero(rows)[:MAX_EXAMPLES]
    return tuple(str(value)[:MAX_EXAMPLE_CHARS] for value in new["sample_id"].take(pa.array(numbers)).to_pylist())


def _refusal(found: Duplicates, num_rows: int, total: int) -> str:
    return (
        f"The batch can't be merged: {num_rows:,} of its {total:,} rows are duplicates "
        f"({found.num_by_id:,} by sample id, {found.num_by_content:,} by content; "
        f"{found.num_in_batch:,} repeat a row of the batch itself), such as {', '.join(map(ascii, found.examples))}.\n"
        "Nothing was changed. Set duplicates=keep_old to drop these rows, or duplicates=keep_new to let them replace "
        "the rows that are there."
    )
