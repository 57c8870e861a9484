"""Prompts files, runs against the stub server, and what a batch holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.data.completions import Completion, read_completions
from dflash.generate.config import GenerateRun
from dflash.generate.outcome import Outcome
from dflash.generate.session import GenerateSession
from tests.generate.stub_server import Stub

MakeRun = Callable[..., GenerateRun]


def prompt(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"q-{number}", "messages": [{"role": "user", "content": f"question {number}"}], **fields}


def write_prompts(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run over prompts `q-0` to `q-(n-1)` into `batch`."""

    def make(stub: Stub, num_prompts: int, **fields: Any) -> GenerateRun:
        path = tmp_path / "prompts.jsonl"
        if not path.exists():
            write_prompts(path, [prompt(number) for number in range(num_prompts)])
        chosen: dict[str, Any] = {"request_timeout_s": 20, "part_records": 10, "max_in_flight": 16} | fields
        return GenerateRun(prompts=str(path), batch=str(tmp_path / "batch"), endpoints=(stub.url,), **chosen)

    return make


def generate(run: GenerateRun, work: Path, api_key: str | None = None) -> Outcome:
    with GenerateSession(run, api_key, work) as session:
        session.plan()
        return session.finish(session.generate())


def completions(batch: Path) -> list[Completion]:
    """Every record of a batch as our reader reads it; none is rejected."""
    read = [entry for path in sorted(batch.glob("*.jsonl")) for entry in read_completions(path, file=path.name)]
    assert all(isinstance(entry, Completion) for entry in read), read
    return [entry for entry in read if isinstance(entry, Completion)]


def records(batch: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(batch.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
