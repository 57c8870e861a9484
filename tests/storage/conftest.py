"""Each kind of store, empty, for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.storage import S3Store, Store, open_store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    s3_store: S3Store = request.getfixturevalue("s3_store")
    return s3_store
