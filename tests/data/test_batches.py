from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.data.batch_place import place_problem
from dflash.data.batches import BatchOrder, BatchState, LocalShards, Pack, best_fit, rank_share
from dflash.data.prefetch import prefetch
from dflash.errors import DamagedDatasetError, DatasetError, UsageError


def write_shard(path: Path, lengths: Sequence[int], first: int = 0) -> Path:
    ids = [[first + row] * length for row, length in enumerate(lengths)]
    table = pa.table(
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "loss_mask": pa.array([[False] + [True] * (length - 1) for length in lengths], pa.list_(pa.bool_())),
            "sample_id": [f"s{first + row}" for row in range(len(lengths))],
            "source": ["even" if row % 2 == 0 else "odd" for row in range(len(lengths))],
            "num_loss_tokens": pa.array([length - 1 for length in lengths], pa.int32()),
        }
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


@pytest.fixture
def shards(tmp_path: Path) -> LocalShards:
    lengths = [[3, 9, 5, 7, 2, 12, 4], [6] * 5, [], [11, 3, 8, 2]]
    paths = [write_shard(tmp_path / f"{index}.arrow", rows, first=100 * index) for index, rows in enumerate(lengths)]
    return LocalShards.scan(paths)


def keys(packs: Iterator[Pack]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(row.key for row in pack.rows) for pack in packs]


def test_scan_counts_rows_and_tokens(shards: LocalShards) -> None:
    assert shards.num_rows == (7, 5, 0, 4)
    assert shards.num_tokens == (42, 30, 0, 24)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), window=st.integers(1, 9), budget=st.integers(12, 40), epochs=st.integers(1, 3))
def test_each_epoch_gives_each_row_once(shards: LocalShards, seed: int, window: int, budget: int, epochs: int) -> None:
    packs = list(BatchOrder(seed, budget, window, epochs).packs(shards))
    expected = sorted((shard, row) for shard, rows in enumerate(shards.num_rows) for row in range(rows))
    for epoch in range(epochs):
        assert sorted(row.key for pack in packs if pack.epoch == epoch for row in pack.rows) == expected
    assert all(pack.num_tokens <= budget for pack in packs)
    assert [pack.index for pack in packs] == list(range(len(packs)))
    assert packs[-1].after.num_tokens == epochs * sum(shards.num_tokens)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 20), window=st.integers(1, 9), world=st.integers(1, 5), new_world=st.integers(1, 5))
def test_resuming_at_another_world_size_goes_on_in_the_same_order(
    shards: LocalShards, cut: int, window: int, world: int, new_world: int
) -> None:
    order = BatchOrder(seed=3, pack_tokens=15, window_rows=window, num_epochs=3)
    whole = list(order.packs(shards))
    cut = min(cut, len(whole) - 1) // world * world
    state = BatchState.from_json(whole[cut - 1].after.to_json()) if cut else None
    shares = [list(rank_share(order.packs(shards, state), rank, new_world)) for rank in range(new_world)]
    assert len({len(share) for share in shares}) == 1
    rounds = list(zip(*shares, strict=True))
    merged = [share.pack for group in rounds for share in group if share.pack is not None]
    assert keys(iter(merged)) == keys(iter(whole[cut:]))
    assert [pack.after for pack in merged] == [pack.after for pack in whole[cut:]]
    for group in rounds:
        assert {share.after for share in group} == {[s.pack.after for s in group if s.pack is not None][-1]}


def test_epochs_and_seeds_differ_but_repeat(shards: LocalShards) -> None:
    packs = list(BatchOrder(1, 15, 4, 2).packs(shards))
    first, second = ([keys(iter([pack]))[0] for pack in packs if pack.epoch == epoch] for epoch in (0, 1))
    assert first != second
    assert keys(BatchOrder(1, 15, 4, 2).packs(shards)) == first + second
    assert keys(BatchOrder(2, 15, 4, 1).packs(shards)) != first


def test_rows_come_back_as_written_and_long_ones_are_cut(shards: LocalShards) -> None:
    packs = list(BatchOrder(0, 10, 4, 1).packs(shards))
    rows = {row.key: row for pack in packs for row in pack.rows}
    assert packs[-1].after.num_tokens == sum(shards.num_tokens), "rows that are cut count whole, or no run is ever done"
    assert rows[1, 2].input_ids.tolist() == [102] * 6
    assert rows[1, 2].loss_mask.tolist() == [False] + [True] * 5
    assert (rows[1, 2].sample_id, rows[3, 1].source) == ("s102", "odd")
    assert len(rows[0, 5].input_ids) == len(rows[0, 5].loss_mask) == 10


@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_places_each_item_once_within_the_budget(lengths: list[int]) -> None:
    array = np.array(lengths, dtype=np.int64)
    bins = best_fit(array, 50)
    assert sorted(int(item) for items in bins for item in items) == list(range(len(lengths)))
    assert all(array[items].sum() <= 50 for items in bins)


def test_halves_split_rows_near_the_middle(shards: LocalShards) -> None:
    pack = max(BatchOrder(0, 40, 9, 1).packs(shards), key=lambda pack: len(pack.rows))
    halves = pack.halves()
    assert [row for half in halves for row in half.rows] == list(pack.rows)
    assert all(half.rows for half in halves)
    assert max(half.num_tokens for half in halves) < pack.num_tokens
    single = next(pack for pack in BatchOrder(0, 12, 1, 1).packs(shards))
    assert single.halves() == (single,)


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    empty = LocalShards.scan([write_shard(tmp_path / "empty.arrow", [])])
    with pytest.raises(DatasetError, match="no rows"):
        next(BatchOrder(0, 10).packs(empty))


def test_a_shard_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "shard.arrow", [4, 5])
    with pytest.raises(DamagedDatasetError, match="has 2 rows, but its manifest says 3"):
        next(BatchOrder(0, 10).packs(LocalShards((path,), (3,), (9,))))
    cut = tmp_path / "cut.arrow"
    cut.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedDatasetError, match="not a readable Arrow"):
        next(BatchOrder(0, 10).packs(LocalShards((cut,), (2,), (9,))))


def test_a_mask_of_another_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard.arrow"
    table = pa.table({"input_ids": [[1, 2, 3]], "loss_mask": [[True, True]], "sample_id": ["a"], "source": [""]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DamagedDatasetError, match="loss_mask"):
        next(BatchOrder(0, 10).packs(LocalShards((path,), (1,), (3,))))


@pytest.mark.parametrize("fields", [{}, {"epoch": -1}, {"epoch": "0"}, {"epoch": True}, {"era": 1}])
def test_a_damaged_state_is_refused(fields: dict[str, object]) -> None:
    full = BatchState().to_json() | fields if fields else {}
    with pytest.raises(UsageError, match="batch state"):
        BatchState.from_json(full)


def test_budgets_below_two_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 2 tokens"):
        BatchOrder(0, 1)


def test_prefetch_gives_the_items_then_their_error_and_closes() -> None:
    def failing() -> Iterator[int]:
        yield from (1, 2)
        raise DatasetError("gone")

    seen = []
    with pytest.raises(DatasetError, match="gone"):
        seen.extend(prefetch(failing()))
    items = prefetch(itertools.count())
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    items.close()
    assert list(prefetch(iter([]))) == []


def test_an_error_in_fetching_reaches_the_reader(shards: LocalShards) -> None:
    class Broken:
        num_rows = shards.num_rows
        num_tokens = shards.num_tokens

        def fetch(self, index: int) -> Path:
            raise DatasetError(f"shard {index} is gone")

    with pytest.raises(DatasetError, match="is gone"):
        next(BatchOrder(0, 20).packs(Broken()))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), window=st.integers(1, 9), budget=st.integers(2, 40))
def test_every_place_of_a_run_is_in_its_data_and_what_is_far_from_it_is_not(
    shards: LocalShards, seed: int, window: int, budget: int
) -> None:
    order = BatchOrder(seed, budget, window, 3)
    places = [BatchState(), *(pack.after for pack in order.packs(shards))]
    assert [problem for at in places if (problem := place_problem(order, at, shards))] == []
    total = sum(shards.num_tokens)
    for at in places:
        for change in ({"epoch": at.epoch + 2}, {"num_tokens": at.num_tokens + total + 1}, {"shard": at.shard + 4}):
            assert place_problem(order, replace(at, **change), shards)
