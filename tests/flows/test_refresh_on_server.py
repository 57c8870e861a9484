"""The refresh deployment on a real server: by event, two at a time, and retried after a bad batch."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from dflash.data.dataset import DatasetRoot
from dflash.storage import open_store
from tests.flows.server import Server, wait_for

if TYPE_CHECKING:
    from embedded.stack import StackConnection

pytestmark = pytest.mark.slow

LOOSE_GATE = {"max_length_cut_share": 1, "max_single_loss_count_share": 1, "max_tiny_mask_share": 1}


def land(stack: StackConnection, folder: str, name: str, data: bytes) -> None:
    """A complete batch of one file."""
    store = open_store(f"{folder}/{name}", stack.s3)
    store.put_if_absent("part-0.jsonl", data)
    store.put_if_absent("_SUCCESS", b"")


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def sources(stack: StackConnection, dataset: str, cache: Path) -> list[tuple[int, str]]:
    """Version and newest batch of every version that was ever published."""
    root = DatasetRoot.open(dataset, stack.s3, cache)
    pointer = root.pointer()
    moves = () if pointer is None else pointer.record.history
    return [(move.version, root.manifest(move.manifest).batches[-1].source.rpartition("/")[2]) for move in moves]


def test_two_runs_merge_once_and_a_retry_goes_on_behind_a_mended_batch(
    stack: StackConnection, example_records: list[dict[str, Any]], smollm2_tokenizer_dir: Path, tmp_path: Path
) -> None:
    server = Server.of(stack)
    folder, dataset = f"s3://{stack.bucket}/refresh/completions", f"s3://{stack.bucket}/refresh/train"
    land(stack, folder, "0001", lines(example_records[:10]))
    land(stack, folder, "0002", b"\xff\x00 cut off in transfer\n")
    batch = {"source": folder, "dataset": dataset, "tokenizer": str(smollm2_tokenizer_dir), "num_workers": 1}
    config = {"merge": {"batch": batch | {"gate": LOOSE_GATE}, "duplicates": "keep_old"}}
    runs = [server.start("refresh-dataset", config) for _ in range(2)]
    ended = [server.wait(run) for run in runs]
    assert [run["state"]["type"] for run in ended] == ["FAILED", "FAILED"]
    assert all("Batch 0002 was not merged" in run["state"]["message"] for run in ended)
    assert sources(stack, dataset, tmp_path) == [(1, "0001")]

    store = open_store(f"{folder}/0002", stack.s3)
    store.replace("part-0.jsonl", lines(example_records[20:30]), if_match=store.head("part-0.jsonl").etag)
    server.retry(runs[0])
    wait_for(lambda: server.api.get(f"/flow_runs/{runs[0]}")["run_count"] == 2, 120)
    assert server.wait(runs[0])["state"]["type"] == "COMPLETED"
    assert sources(stack, dataset, tmp_path) == [(1, "0001"), (2, "0002")]


def test_the_event_of_a_finished_batch_starts_the_refresh(stack: StackConnection, smollm2_tokenizer_dir: Path) -> None:
    """With the parameters of the deployments file; there is no batch, so the run has nothing to do."""
    server = Server.of(stack)
    shutil.copytree(smollm2_tokenizer_dir, stack.project / ".dflash/models/smollm2-tokenizer", dirs_exist_ok=True)
    (deployment,) = server.post("/deployments/filter", {"deployments": {"name": {"any_": ["refresh-dataset"]}}})
    assert [(item["schedule"]["cron"], item["active"]) for item in deployment["schedules"]] == [("7 * * * *", True)]
    assert deployment["global_concurrency_limit"]["limit"] == 1

    event = {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "generation.batch.completed",
        "resource": {"prefect.resource.id": "generation.batch.2026-11-30"},
    }
    server.post("/events", [event])

    def triggered() -> Any:
        automatic = {"flow_runs": {"deployment_id": {"any_": [deployment["id"]]}}, "sort": "START_TIME_DESC"}
        runs = server.post("/flow_runs/filter", automatic)
        return [run for run in runs if (run["created_by"] or {}).get("type") == "AUTOMATION"]

    run = server.wait(wait_for(triggered, 60)[0]["id"])
    assert (run["state"]["type"], run["name"]) == ("COMPLETED", "refresh-train")


@pytest.mark.parametrize(
    "name",
    ["merge-dataset", "refresh-dataset", "backup-dataset", "rollback-dataset", "train-online", "train-drafter"],
)
def test_every_deployment_has_a_form(stack: StackConnection, name: str) -> None:
    (found,) = Server.of(stack).post("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
    assert found["parameter_openapi_schema"]["properties"]
