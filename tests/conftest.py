"""Fixtures shared by the whole suite: real tokenizers, the real object store, real inputs where present."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dflash.storage import S3Store
    from embedded.seaweedfs import SeaweedServer
    from embedded.stack import StackConnection

REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = REPOSITORY / ".dflash" / "models"
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of openly licensed real inputs that lies beside the checkout on some machines."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder of shared real inputs is not on this machine")
    return SHARED_DATA


@pytest.fixture(scope="session")
def smollm2_tokenizer_dir() -> Path:
    """Folder with the real SmolLM2-135M-Instruct tokenizer."""
    from embedded.smollm2 import ensure_smollm2_tokenizer

    return ensure_smollm2_tokenizer(MODELS / "smollm2-tokenizer")


@pytest.fixture(scope="session")
def qwen36_dir(shared_data: Path) -> Path:
    """Folder with the real Qwen3.6 tokenizer and its chat template."""
    from embedded.qwen_tokenizer import ensure_qwen36_tokenizer

    return ensure_qwen36_tokenizer(MODELS / "qwen3.6-tokenizer", shared_data / "qwen3.6" / "chat_template.jinja")


@pytest.fixture(scope="session")
def example_completions() -> Path:
    """Folder with the completions that the small target wrote."""
    return REPOSITORY / "examples" / "completions"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A real S3 server that dies with the test run."""
    from embedded.seaweedfs import SeaweedConfig, start_seaweedfs, stop_seaweedfs

    directory = tmp_path_factory.mktemp("seaweedfs")
    yield start_seaweedfs(directory, SeaweedConfig(attached=True))
    stop_seaweedfs(directory)


@pytest.fixture
def s3_store(s3_server: SeaweedServer) -> S3Store:
    """An empty prefix on the real S3 server."""
    from dflash.storage import S3Store, TransferLimits, open_store

    limits = TransferLimits(list_page_keys=100, first_wait_s=0.01, max_wait_s=0.05)
    store = open_store(f"{s3_server.uri}/test-{uuid.uuid4().hex}", s3_server.credentials, limits)
    assert isinstance(store, S3Store)
    return store


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackConnection]:
    """The whole embedded stack with all deployments: object store, Prefect server, a worker for each pool."""
    from embedded.stack import connect, down, up
    from tests.embedded.postgres_folder import reachable_folder

    on_postgres = os.environ.get("DFLASH_TEST_DATABASE") == "postgres"
    with reachable_folder() if on_postgres else contextlib.nullcontext(tmp_path_factory.mktemp("stack")) as project:
        try:
            up(project, lambda _: None, database="postgres" if on_postgres else None)
            yield connect(project)
        finally:
            down(project, lambda _: None)
