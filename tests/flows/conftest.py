"""A real Prefect server for the session, and batches of real completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embedded.prefect_server import temporary_prefect_server

BatchWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server that flows of this process run against."""
    with pytest.MonkeyPatch.context() as patch, temporary_prefect_server():
        patch.setenv("DFLASH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, so that no spooled shard of another test is reused."""
    folder = tmp_path / "home"
    monkeypatch.setenv("DFLASH_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def example_records(example_completions: Path) -> list[dict[str, Any]]:
    """Records that the small target wrote."""
    parts = sorted(example_completions.glob("part-*.jsonl"))
    if not parts:
        pytest.skip("examples/completions holds no parts")
    return [json.loads(line) for part in parts[:2] for line in part.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def write_batch(tmp_path: Path, example_records: list[dict[str, Any]]) -> BatchWriter:
    """Write records (real ones by default) to a folder of JSON Lines files."""

    def write(records: list[dict[str, Any]] | None = None, num_files: int = 5, name: str = "batch") -> Path:
        rows = example_records[:60] if records is None else records
        folder = tmp_path / name
        folder.mkdir()
        for number in range(num_files):
            lines = [json.dumps(row) for row in rows[number::num_files]]
            (folder / f"part-{number:05d}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return folder

    return write
