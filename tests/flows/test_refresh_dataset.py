"""The refresh flow on real completions in folders, with a real tokenizer and a real Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from datasets import load_from_disk
from prefect.client.orchestration import get_client

from dflash.config import GateThresholds, MergeRun, RefreshRun, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.errors import GateError, UsageError
from tasks.refreshing import start_training

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "home")]

Records = list[dict[str, Any]]
BatchWriter = Callable[..., Path]
MakeRun = Callable[..., RefreshRun]


@pytest.fixture
def land(write_batch: BatchWriter, example_records: Records, tmp_path: Path) -> Callable[..., Path]:
    """Write a batch of 12 rows into the folder of batches, complete unless said otherwise."""
    (tmp_path / "completions").mkdir()

    def write(name: str, start: int, *, success: bool = True, records: Records | None = None) -> Path:
        rows = example_records[start : start + 12] if records is None else records
        folder = write_batch(rows, 2, f"completions/{name}")
        if success:
            (folder / "_SUCCESS").touch()
        return folder

    return write


@pytest.fixture
def make_run(tmp_path: Path, smollm2_tokenizer_dir: Path) -> MakeRun:
    def make(**values: Any) -> RefreshRun:
        batch = TokenizeRun(
            source=str(tmp_path / "completions"),
            dataset=str(tmp_path / "dataset"),
            tokenizer=str(smollm2_tokenizer_dir),
            files_per_shard=2,
            num_workers=1,
            # Completions of the small target are capped at 128 tokens; a dozen rows have no steady mix.
            gate=GateThresholds(
                max_length_cut_share=1.0,
                max_script_shift=1.0,
                max_duplicate_share=1.0,
                max_single_loss_count_share=1.0,
                max_tiny_mask_share=1.0,
            ),
        )
        return RefreshRun(merge=MergeRun(batch=batch, duplicates="keep_old"), **values)

    return make


def refresh(run: RefreshRun) -> dict[str, Any]:
    from flows.refresh_dataset import refresh_dataset

    return refresh_dataset(run)


def sources(run: RefreshRun) -> list[str]:
    manifest = DatasetRoot.open(run.merge.batch.dataset).current()
    return [] if manifest is None else [Path(batch.source).name for batch in manifest.batches]


def test_complete_batches_are_merged_once_in_order_of_name(land: Callable[..., Path], make_run: MakeRun) -> None:
    run = make_run()
    assert refresh(run)["merged"] == {}
    open_batch = land("0003", 24, success=False)
    land("0002", 12)
    land("0001", 0)
    first = refresh(run)
    assert [(name, item["version"]) for name, item in first["merged"].items()] == [("0001", 1), ("0002", 2)]
    assert first["waiting"] == ["0003"]
    (open_batch / "_SUCCESS").touch()
    assert list(refresh(run)["merged"]) == ["0003"]
    again = refresh(run)
    assert (again["merged"], again["waiting"], again["training"]) == ({}, [], None)
    assert sources(run) == ["0001", "0002", "0003"]
    assert (
        load_from_disk(run.merge.batch.dataset).num_rows
        == DatasetRoot.open(run.merge.batch.dataset).manifest().counts.num_rows
    )


def test_a_batch_that_fails_is_named_and_holds_back_those_behind_it(
    land: Callable[..., Path], make_run: MakeRun, example_records: Records
) -> None:
    land("0001", 0)
    land("0002", 0, records=[{"id": f"{n}", "messages": []} for n in range(6)] + example_records[20:26])
    land("0003", 30)
    run = make_run()
    with pytest.raises(GateError, match=r"Batch 0002 was not merged(.|\n)*Held back behind it: 0003") as caught:
        refresh(run)
    assert "rejected" in str(caught.value)
    assert sources(run) == ["0001"]
    assert list(refresh(make_run(skip=("0002",)))["merged"]) == ["0003"]
    assert sources(run) == ["0001", "0003"]


def test_two_refreshes_at_a_time_merge_once(land: Callable[..., Path], make_run: MakeRun, tmp_path: Path) -> None:
    land("0001", 0)
    land("0002", 12)
    run = make_run()
    parameters = tmp_path / "run.json"
    parameters.write_text(run.model_dump_json())
    code = (
        "from dflash.config import RefreshRun; from flows.refresh_dataset import refresh_dataset;"
        f"refresh_dataset(RefreshRun.model_validate_json(open({str(parameters)!r}).read()))"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"DFLASH_HOME": str(tmp_path / "other-home")},
        stderr=subprocess.PIPE,
    )
    refresh(run)
    _, errors = other.communicate(timeout=120)
    assert other.returncode == 0, errors.decode()
    pointer = DatasetRoot.open(run.merge.batch.dataset).pointer()
    assert pointer is not None
    assert [move.version for move in pointer.record.history] == [1, 2]
    assert sources(run) == ["0001", "0002"]


def deploy(name: str, parameters: dict[str, Any]) -> str:
    """A deployment as `train-drafter` is one: with one parameter, `config`, that has no default."""
    schema = {"type": "object", "properties": {"config": {"type": "object"}}, "required": ["config"]}
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name("training")
        client.create_deployment(
            flow_id, name, parameters=parameters, parameter_openapi_schema=schema, enforce_parameter_schema=True
        )
    return f"training/{name}"


def test_a_new_version_starts_its_training_once_with_the_deployments_own_parameters(
    land: Callable[..., Path], make_run: MakeRun
) -> None:
    land("0001", 0)
    run = make_run(train=deploy("ready", {"config": {"epochs": 3}}))
    started = refresh(run)["training"]
    version = DatasetRoot.open(run.merge.batch.dataset).manifest().name
    assert start_training.fn(str(run.train), version) == started
    assert refresh(run)["training"] is None
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(started))
    assert flow_run.parameters == {"config": {"epochs": 3}}
    assert flow_run.idempotency_key == f"refresh-{version}"
    assert flow_run.parent_task_run_id is None


def test_a_training_that_can_not_start_as_it_is_deployed_says_so(land: Callable[..., Path], make_run: MakeRun) -> None:
    land("0001", 0)
    run = make_run(train=deploy("bare", {}))
    with pytest.raises(UsageError, match=r"v000001-\w+ is published(.|\n)*training/bare(.|\n)*'config' is a required"):
        refresh(run)
    assert sources(run) == ["0001"]


def test_a_training_that_does_not_exist_is_named_after_the_merge(land: Callable[..., Path], make_run: MakeRun) -> None:
    land("0001", 0)
    run = make_run(train="no-flow/no-deployment")
    with pytest.raises(UsageError, match=r"v000001-\w+ is published(.|\n)*no-flow/no-deployment"):
        refresh(run)
    assert sources(run) == ["0001"]
