"""A real S3 server for the session, and each kind of store, empty, for a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.storage import S3Store, Store, TransferLimits, open_store
from embedded.seaweedfs import SeaweedConfig, SeaweedServer, start_seaweedfs, stop_seaweedfs


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A real S3 server that dies with the test run."""
    directory = tmp_path_factory.mktemp("seaweedfs")
    yield start_seaweedfs(directory, SeaweedConfig(attached=True))
    stop_seaweedfs(directory)


@pytest.fixture
def s3_store(s3_server: SeaweedServer) -> S3Store:
    """An empty prefix on the real S3 server."""
    limits = TransferLimits(list_page_keys=100, first_wait_s=0.01, max_wait_s=0.05)
    store = open_store(f"{s3_server.uri}/test-{uuid.uuid4().hex}", s3_server.credentials, limits)
    assert isinstance(store, S3Store)
    return store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    s3_store: S3Store = request.getfixturevalue("s3_store")
    return s3_store
