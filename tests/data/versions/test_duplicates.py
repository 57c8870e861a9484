from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.duplicates import find_duplicates
from dflash.errors import IncompatibleError

Pairs = list[tuple[int, int]]


def table(pairs: Pairs) -> pa.Table:
    hashes = [hashlib.blake2b(bytes([content]), digest_size=16).digest() for _, content in pairs]
    return pa.table(
        {
            "sample_id": pa.array([f"id-{name}" for name, _ in pairs], pa.string()),
            "content_hash": pa.array(hashes, pa.binary(16)),
        }
    )


def simple(old: Pairs, new: Pairs, *, keep_new: bool) -> tuple[list[bool], list[bool]]:
    """The rule, one row at a time."""

    def clash(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one[0] == other[0] or one[1] == other[1]

    kept: Pairs = [] if keep_new else list(old)
    order = list(enumerate(new))
    drop_new = [False] * len(new)
    if not keep_new:
        order = [(row, pair) for row, pair in order if not any(clash(pair, other) for other in old)]
        drop_new = [any(clash(pair, other) for other in old) for pair in new]
    for row, pair in reversed(order) if keep_new else order:
        drop_new[row] = any(clash(pair, other) for other in kept)
        if not drop_new[row]:
            kept.append(pair)
    drop_old = [keep_new and any(clash(pair, other) for other in kept) for pair in old]
    return drop_old, drop_new


PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(old=PAIRS, new=PAIRS, keep_new=st.booleans())
def test_it_gives_what_comparing_every_pair_gives(old: Pairs, new: Pairs, keep_new: bool) -> None:
    found = find_duplicates(table(old), table(new), "keep_new" if keep_new else "keep_old")
    drop_old, drop_new = simple(old, new, keep_new=keep_new)
    assert (found.drop_old.tolist(), found.drop_new.tolist()) == (drop_old, drop_new)
    assert found.num_dropped == sum(drop_old) + sum(drop_new)


@settings(max_examples=60, deadline=None)
@given(old=PAIRS, new=PAIRS)
def test_error_refuses_exactly_what_the_others_would_drop(old: Pairs, new: Pairs) -> None:
    expected = find_duplicates(table(old), table(new), "keep_old")
    if not expected.drop_new.any():
        assert find_duplicates(table(old), table(new), "error").num_dropped == 0
        return
    with pytest.raises(IncompatibleError, match="Nothing was changed"):
        find_duplicates(table(old), table(new), "error")


def test_counts_say_by_what_rows_repeat() -> None:
    found = find_duplicates(table([(1, 1)]), table([(1, 5), (2, 1), (3, 3), (3, 4)]), "keep_old")
    assert found.to_json() == {
        "by_id": 2,
        "by_content": 1,
        "inside_the_batch": 1,
        "dropped_old": 0,
        "dropped_new": 3,
    }
    assert found.examples == ("id-1", "id-2", "id-3")


def test_a_name_with_control_characters_is_escaped_in_the_error() -> None:
    old = table([(1, 1)]).set_column(0, "sample_id", pa.array(["\x1b[2Jx"]))
    new: Any = table([(2, 1)]).set_column(0, "sample_id", pa.array(["\x1b[2Jx"]))
    with pytest.raises(IncompatibleError) as caught:
        find_duplicates(old, new, "error")
    assert "\x1b" not in str(caught.value)


def test_a_full_size_merge_is_compared_in_seconds() -> None:
    rng = np.random.default_rng(0)

    def rows(first: int, count: int) -> pa.Table:
        hashes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(rng.bytes(16 * count))])
        return pa.table({"sample_id": [f"sample-{n}" for n in range(first, first + count)], "content_hash": hashes})

    found = find_duplicates(rows(0, 902_087), rows(902_000, 192_995), "keep_new")
    assert found.num_dropped == int(found.drop_old.sum()) == 87
