"""One batch made by several processes is the dataset that one process makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from dflash.config import SliceRun, SpreadRun, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.storage import open_store
from flows.tokenize_completions import tokenize_completions
from flows.tokenize_on_workers import tokenize_on_dask, tokenize_slice
from tests.flows.server import Server, wait_for
from tests.flows.small_runs import small_run

if TYPE_CHECKING:
    from embedded.stack import StackConnection
    from tests.flows.conftest import BatchWriter


def _shards(root: str, cache: Path, credentials: Any = None) -> list[str]:
    manifest = DatasetRoot.open(root, credentials, cache).current()
    assert manifest is not None
    return [shard.sha256 for shard in manifest.shards]


@pytest.mark.usefixtures("prefect_server", "home")
def test_slices_leave_nothing_to_make(write_batch: BatchWriter, tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    batch = write_batch(num_files=5)
    run = small_run(batch, tmp_path / "sliced", smollm2_tokenizer_dir)
    made = [tokenize_slice(SliceRun(run=run, num_slices=3, slice_number=number)) for number in range(3)]
    assert [slice_["shards"] for slice_ in made] == [2, 2, 1]
    assert DatasetRoot.open(run.dataset, None, tmp_path / "c").current() is None, "slices publish nothing"
    result = tokenize_completions(run)
    assert result["rows"] == sum(slice_["rows"] for slice_ in made) == 60
    whole = small_run(batch, tmp_path / "whole", smollm2_tokenizer_dir)
    tokenize_completions(whole)
    assert _shards(run.dataset, tmp_path / "c") == _shards(whole.dataset, tmp_path / "c")


def test_a_slice_beyond_the_last_is_refused() -> None:
    run = TokenizeRun(source="a", dataset="b", tokenizer="c")
    with pytest.raises(ValidationError, match="less than num_slices, 2"):
        SliceRun(run=run, num_slices=2, slice_number=2)


@contextmanager
def _second_worker(stack: StackConnection) -> Iterator[None]:
    """One more process that takes runs of the pool `cpu`, as on another host."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "cpu", "--name", "second"]
    with subprocess.Popen(
        command,
        env=os.environ | {"PREFECT_API_URL": stack.prefect_api_url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as worker:
        try:
            yield
        finally:
            worker.terminate()


@pytest.mark.slow
def test_two_workers_share_a_run(
    stack: StackConnection, example_records: list[dict[str, Any]], smollm2_tokenizer_dir: Path, tmp_path: Path
) -> None:
    server = Server.of(stack)
    place = f"s3://{stack.bucket}/on-workers"
    run = small_run(f"{place}/completions", f"{place}/train", smollm2_tokenizer_dir)
    store = open_store(run.source, stack.s3)
    for number in range(6):
        rows = example_records[5 * number : 5 * number + 5]
        store.put_if_absent(f"part-{number}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    with _second_worker(stack):
        wait_for(lambda: len(server.post("/work_pools/cpu/workers/filter", {})) >= 2)
        config = SpreadRun(run=run, num_slices=2).model_dump(mode="json")
        ended = server.wait(server.start("tokenize-on-workers", config))
    assert ended["state"]["type"] == "COMPLETED", ended["state"]["message"]
    slices = server.post("/flow_runs/filter", {"flows": {"name": {"any_": ["tokenize-slice"]}}})
    assert [one["state"]["type"] for one in slices] == ["COMPLETED"] * 2
    manifest = DatasetRoot.open(run.dataset, stack.s3, tmp_path).current()
    assert manifest is not None
    assert manifest.counts.num_rows == 30


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "home")
def test_two_dask_processes_share_a_run(write_batch: BatchWriter, tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    pytest.importorskip("prefect_dask", reason="needs the extra `scale`: make test-scale")
    batch = write_batch(num_files=5)
    run = small_run(batch, tmp_path / "dask", smollm2_tokenizer_dir)
    assert tokenize_on_dask(SpreadRun(run=run, num_slices=2))["rows"] == 60
    whole = small_run(batch, tmp_path / "whole", smollm2_tokenizer_dir)
    tokenize_completions(whole)
    assert _shards(run.dataset, tmp_path / "c") == _shards(whole.dataset, tmp_path / "c")
