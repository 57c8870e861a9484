"""Where a compiler is at hand, the native code was built: nothing falls back to Python unseen."""

from __future__ import annotations

import importlib
import shutil

import pytest


@pytest.mark.parametrize("name", ["dflash.data._plain_rows", "dflash.data._row_hashes", "dflash.storage._md5_lanes"])
def test_native_code_was_built(name: str) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no compiler here")
    importlib.import_module(name)
