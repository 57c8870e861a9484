from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash.config import MixOptions
from dflash.data.mixing import draw_rows
from dflash.errors import UsageError


def index(names: list[str], sources: list[str]) -> pa.Table:
    return pa.table({"sample_id": pa.array(names, pa.string()), "source": pa.array(sources, pa.string())})


def drawn(table: pa.Table, options: MixOptions) -> set[str]:
    draw = draw_rows(table, np.ones(table.num_rows, np.bool_), options)
    return set(table["sample_id"].filter(pa.array(draw.taken)).to_pylist())


NAMES = [f"n{number}" for number in range(60)]
SOURCES = ["abc"[number % 3] for number in range(60)]


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(60)), seed=st.integers(0, 5), count=st.integers(1, 60), cap=st.integers(0, 30))
def test_a_draw_depends_on_ids_and_seed_not_on_order(order: list[int], seed: int, count: int, cap: int) -> None:
    options = MixOptions(max_samples=count, source_caps={"a": cap}, source_weights={"b": 3.0}, seed=seed)
    shuffled = index([NAMES[place] for place in order], [SOURCES[place] for place in order])
    result = drawn(index(NAMES, SOURCES), options)
    assert drawn(shuffled, options) == result
    assert len(result) == min(count, 40 + min(cap, 20))
    assert sum(SOURCES[NAMES.index(name)] == "a" for name in result) <= cap
    larger = options.model_copy(update={"max_samples": 60})
    assert result <= drawn(index(NAMES, SOURCES), larger)


def test_another_seed_draws_other_rows() -> None:
    table = index(NAMES, SOURCES)
    assert drawn(table, MixOptions(max_samples=20, seed=1)) != drawn(table, MixOptions(max_samples=20, seed=2))


def test_weights_are_chances() -> None:
    names = [f"n{number}" for number in range(40_000)]
    table = index(names, ["a" if number % 2 else "b" for number in range(40_000)])
    options = MixOptions(max_samples=4_000, source_weights={"a": 3.0})
    draw = draw_rows(table, np.ones(40_000, np.bool_), options)
    # Without replacement the share stays near 3 of 4 while the draw is a tenth: 0.75 +- 0.02 is 3 sigma.
    assert draw.drawn["a"] / 4_000 == pytest.approx(0.745, abs=0.02)
    assert draw.available == {"a": 20_000, "b": 20_000}


def test_a_weight_of_zero_leaves_a_source_out() -> None:
    result = drawn(index(NAMES, SOURCES), MixOptions(max_samples=60, source_weights={"c": 0}))
    assert Counter(SOURCES[NAMES.index(name)] for name in result) == {"a": 20, "b": 20}


def test_rows_that_are_out_already_are_not_drawn() -> None:
    eligible = np.array([number < 10 for number in range(60)])
    draw = draw_rows(index(NAMES, SOURCES), eligible, MixOptions(max_samples=30))
    assert draw.taken.tolist() == eligible.tolist()
    assert draw.available == draw.drawn == {"a": 4, "b": 3, "c": 3}


def test_a_source_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"doesn't have: cod\. Its sources and rows: a 20, b 20, c 20"):
        drawn(index(NAMES, SOURCES), MixOptions(source_caps={"cod": 1}))


@pytest.mark.parametrize(
    "values", [{"source_weights": {"a": 1.0}}, {"max_samples": 0}, {"max_samples": 1, "source_weights": {"a": -1}}]
)
def test_options_that_mean_nothing_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MixOptions.model_validate(values)
