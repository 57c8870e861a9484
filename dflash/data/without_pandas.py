"""pyarrow's conversions in processes that have no use for pandas.

Where pandas is installed, `pa.array` and `to_numpy` import it, to ask whether they were given a Series or to look up
its missing values: about a CPU second and 60 MB in every process that tokenizes, merges or verifies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class _NoPandas(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not looked for while pyarrow starts", name=fullname)
        return None


def start_arrow() -> None:
    """Let the first `pa.array` of this process find no pandas; for programs of our own, not for a library's import.

    What asks for pandas objects afterwards still gets them: pyarrow then looks again.
    """
    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([], pa.null())
    finally:
        sys.meta_path.remove(finder)


def to_numpy(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Integers, floats or booleans without nulls [n] as NumPy's; a view where they lie together and aren't bits.

    Raises:
        pa.ArrowInvalid: there are nulls.
    """
    if isinstance(column, pa.ChunkedArray):
        parts = [to_numpy(chunk) for chunk in column.chunks] or [to_numpy(pa.array([], column.type))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    if column.null_count:
        raise pa.ArrowInvalid(f"expected {len(column)} values of {column.type}, found {column.null_count} nulls")
    start, end = column.offset, column.offset + len(column)
    if pa.types.is_boolean(column.type):
        bits = np.frombuffer(column.buffers()[1] or b"", np.uint8)[start // 8 : -(-end // 8)]
        flags = np.unpackbits(bits, bitorder="little")[start % 8 : start % 8 + len(column)]
        return flags.view(np.bool_)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    return np.frombuffer(column.buffers()[1] or b"", column.type.to_pandas_dtype())[start:end]
