"""What the gate holds of a batch: equal to a naive reference, and small."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Final, overload

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import GateThresholds
from dflash.data import mix
from dflash.data.batch_columns import BatchColumns, KeyColumn, read_columns
from dflash.data.mix import mix_of, mix_of_tables
from dflash.data.quality import assess
from dflash.data.rows import RowFlag
from dflash.data.shards import INDEX_SCHEMA
from tests.data.gate_batches import lengths, make_index

MAX_HELD_BYTES: Final = 40

VALUES: Final[dict[str, list[Any]]] = {
    "sample_id": ["a", "b", "", "ä", "a\x00", None],
    "source": ["chat", "code", "", None],
    "content_hash": [bytes(16), b"12345678" + bytes(8), b"12345678" + b"x" * 8, b"y" * 16],
    "num_tokens": list(range(9)),
    "num_loss_tokens": list(range(6)),
    "output_tokens": [None, *range(6)],
    "finish_reason": ["stop"],
    "flags": list(range(128)),
    "script": ["latin", "han"],
}


def make_batch(num_rows: list[int], seed: int) -> list[list[dict[str, Any]]]:
    """Rows of each shard, of values that repeat."""
    choose = random.Random(seed).choice
    return [[{name: choose(values) for name, values in VALUES.items()} for _ in range(count)] for count in num_rows]


BATCH = st.builds(make_batch, st.lists(st.integers(0, 12), max_size=4), st.integers(0, 2**32))


def make_tables(shards: list[list[dict[str, Any]]]) -> list[pa.Table]:
    """Each shard in record batches of five rows, as a sliced table."""
    tables = []
    for rows in shards:
        table = pa.Table.from_pylist([*rows[:1], *rows], INDEX_SCHEMA).slice(len(rows[:1]))
        tables.append(pa.Table.from_batches(table.to_batches(max_chunksize=5), INDEX_SCHEMA))
    return tables


def repeats(rows: list[dict[str, Any]], column: str) -> list[bool]:
    values = [row[column] or "" for row in rows]
    return [value in values[:number] for number, value in enumerate(values)]


def ratio(row: dict[str, Any]) -> float:
    loss, output = row["num_loss_tokens"], row["output_tokens"]
    if agrees(row):
        return 1.0
    value = float(loss / max(output or 1, 1))
    return min(value, 1.0) if row["flags"] & RowFlag.VERBATIM_WHITESPACE else value


def agrees(row: dict[str, Any]) -> bool:
    if row["output_tokens"] is None or row["flags"] & RowFlag.OUTPUT_MISMATCH:
        return False
    return not row["flags"] & RowFlag.WINDOW_CUT or row["num_loss_tokens"] == row["output_tokens"]


@settings(max_examples=60, deadline=None)
@given(BATCH)
def test_columns_equal_those_of_a_naive_reference(shards: list[list[dict[str, Any]]]) -> None:
    rows = [row for shard in shards for row in shard]
    columns = read_columns(make_tables(shards))
    assert columns.num_rows == len(rows)
    assert columns.loss.tolist() == [row["num_loss_tokens"] for row in rows]
    assert columns.agrees.tolist() == [agrees(row) for row in rows]
    known = [row["output_tokens"] is not None for row in rows]
    assert columns.known.tolist() == known
    wanted = [ratio(row) for row in rows]
    assert columns.ratio[columns.known].tolist() == [
        value for value, is_known in zip(wanted, known, strict=True) if is_known
    ]
    beside = RowFlag.VERBATIM_WHITESPACE | RowFlag.SAMPLED_IDS
    assert columns.confirmed.tolist() == [agrees(row) or bool(row["flags"] & beside) for row in rows]
    assert columns.repeated("sample_id").tolist() == repeats(rows, "sample_id")
    assert columns.repeated("content_hash").tolist() == repeats(rows, "content_hash")
    everything = np.ones(len(rows), np.bool_)
    if len(rows) <= 10:
        assert columns.examples(everything) == tuple(row["sample_id"] or "" for row in rows)


@settings(max_examples=60, deadline=None)
@given(BATCH, st.integers(1, 3))
def test_equal_keys_of_different_values_are_no_repeat(shards: list[list[dict[str, Any]]], num_keys: int) -> None:
    columns = read_columns(make_tables(shards))
    collided = replace(columns, id_keys=columns.id_keys % num_keys, content_keys=columns.content_keys % num_keys)
    names: tuple[KeyColumn, ...] = ("sample_id", "content_hash")
    for name in names:
        assert collided.repeated(name).tolist() == columns.repeated(name).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.text("abc", max_size=2), max_size=30), max_size=4))
def test_mix_of_more_names_than_are_counted_at_once(shards: list[list[str]]) -> None:
    tables = [pa.table({"source": pa.array(names, pa.string())}) for names in shards]
    whole = pa.chunked_array(shards, pa.string())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mix, "MAX_NAMES", 4)
        wanted = mix_of(whole)
        for limit in (2, 5, 100):
            patch.setattr(mix, "MAX_COUNTED_AT_ONCE", limit)
            assert mix_of_tables(tables, "source") == wanted
    largest = Counter(name for shard in shards for name in shard)
    if len(largest) <= 4:
        assert wanted == dict(sorted(largest.items()))
    else:
        kept = sorted(largest, key=lambda name: (-largest[name], name))[:4]
        assert wanted == {name: largest[name] for name in kept} | {
            "(other)": largest.total() - sum(largest[n] for n in kept)
        }


class Indexes(Sequence[pa.Table]):
    """Tables that are made when they are asked for; counts those that are alive."""

    def __init__(self, num_tables: int, num_rows: int) -> None:
        self._num_tables, self._num_rows = num_tables, num_rows
        self._alive = self.most_alive = 0

    def __len__(self) -> int:
        return self._num_tables

    @overload
    def __getitem__(self, number: int) -> pa.Table: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[pa.Table]: ...

    def __getitem__(self, number: int | slice) -> pa.Table | Sequence[pa.Table]:
        assert isinstance(number, int)
        table = make_index(lengths(self._num_rows), start=number * self._num_rows)
        self._alive += 1
        self.most_alive = max(self.most_alive, self._alive)
        weakref.finalize(table, self._forget)
        return table

    def __iter__(self) -> Iterator[pa.Table]:
        return (self[number] for number in range(len(self)))

    def _forget(self) -> None:
        self._alive -= 1


def held_bytes(columns: BatchColumns) -> int:
    values = (getattr(columns, field.name) for field in fields(columns))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def test_few_bytes_are_held_of_a_row_and_few_indexes_at_a_time() -> None:
    indexes = Indexes(num_tables=6, num_rows=2000)
    columns = read_columns(indexes)
    assert held_bytes(columns) < MAX_HELD_BYTES * columns.num_rows
    assert assess(indexes, reject_reasons={}, num_records=0, thresholds=GateThresholds()).num_rows == 12_000
    assert indexes.most_alive <= 2  # the one in work, and the next while it is taken up
