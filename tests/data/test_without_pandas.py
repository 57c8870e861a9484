"""What pyarrow gives without pandas is what it gives with it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.without_pandas import to_numpy

TYPES = (pa.bool_(), pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.float64())
FRESH = """
import sys
import numpy as np, pyarrow as pa
from dflash.data.without_pandas import start_arrow, to_numpy
start_arrow()
to_numpy(pa.array(np.arange(3)))
to_numpy(pa.chunked_array([pa.array([True], pa.bool_()), pa.array([], pa.bool_())]))
pa.array(["a"], pa.string())
print("pandas" in sys.modules)
print(type(pa.array([1]).to_pandas()).__module__.split(".")[0])
"""


@settings(deadline=None)  # the expected values import pandas
@given(st.data(), st.sampled_from(TYPES), st.integers(0, 40), st.integers(0, 40))
def test_values_are_pyarrows_own(data: st.DataObject, kind: pa.DataType, start: int, length: int) -> None:
    values = data.draw(st.lists(st.booleans(), max_size=60))
    column = pa.array(values, pa.bool_()).cast(kind) if kind != pa.float64() else pa.array(map(float, values), kind)
    part = column.slice(start, length)
    for one in (part, pa.chunked_array([part, column, part], kind), pa.chunked_array([], kind)):
        expected = one.to_numpy() if isinstance(one, pa.ChunkedArray) else one.to_numpy(zero_copy_only=False)
        found = to_numpy(one)
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()


def test_nulls_are_refused() -> None:
    with pytest.raises(pa.ArrowInvalid, match="expected 2 values of int32, found 1 nulls"):
        to_numpy(pa.array([1, None], pa.int32()))


def test_other_types_are_left_to_pyarrow() -> None:
    assert to_numpy(pa.array(["a", "b"])).tolist() == ["a", "b"]
    assert to_numpy(pa.array([1, 2], pa.timestamp("s"))).dtype == np.dtype("datetime64[s]")


def test_a_program_of_ours_imports_no_pandas_and_can_still_have_it() -> None:
    pytest.importorskip("pandas", reason="pandas isn't installed, so nothing could import it")
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "pandas"]
