"""The main flow on real completions, a real tokenizer and a real Prefect server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest

from dflash.config import GateThresholds, ShardRun, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.data.plan import ShardPlan
from dflash.data.spool import LocalInput
from dflash.data.tokenize_run import TokenizeSession
from dflash.errors import DatasetError, GateError, ShardFailedError, UsageError
from dflash.manifest import Manifest, ShardReceipt

pytestmark = pytest.mark.usefixtures("prefect_server", "home")

Records = list[dict[str, Any]]
BatchWriter = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, smollm2_tokenizer_dir: Path) -> Callable[..., TokenizeRun]:
    def make(source: Path | str, **values: Any) -> TokenizeRun:
        defaults: dict[str, Any] = {
            "dataset": str(tmp_path / "dataset"),
            "tokenizer": str(smollm2_tokenizer_dir),
            "files_per_shard": 1,
            "num_workers": 1,
            # Completions of the small target are capped at 128 tokens, so most of them are cut.
            "gate": GateThresholds(max_length_cut_share=1.0),
        }
        return TokenizeRun(source=str(source), **(defaults | values))

    return make


def run_flow(run: TokenizeRun) -> dict[str, Any]:
    from flows.tokenize_completions import tokenize_completions

    return tokenize_completions(run)


def current(dataset: str) -> Manifest:
    manifest = DatasetRoot.open(dataset).current()
    assert manifest is not None
    return manifest


def spooled(home: Path) -> set[str]:
    return {path.name for path in (home / "work" / "spool").glob("*/*") if not path.name.startswith(".")}


def test_publishes_version_1_that_datasets_opens(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter, example_records: Records
) -> None:
    run = make_run(write_batch())
    result = run_flow(run)
    assert result["rows"] == 60
    assert result["loss_tokens"] == sum(record["output_tokens"] for record in example_records[:60])
    rows = datasets.load_from_disk(run.dataset)
    assert len(rows) == 60
    by_id = {record["id"]: record for record in example_records}
    for row in rows:
        record = by_id[row["sample_id"]]
        assert row["input_ids"] == record["prompt_token_ids"] + record["output_token_ids"]
        assert sum(row["loss_mask"]) == row["num_loss_tokens"] == record["output_tokens"]


def finish_in_reverse(monkeypatch: pytest.MonkeyPatch, num_shards: int) -> list[int]:
    """Let each shard's task end only when the next shard's has; returns the order in which they ended."""
    ended = [threading.Event() for _ in range(num_shards)]
    order: list[int] = []
    tokenize = TokenizeSession.tokenize

    def tokenize_late(session: TokenizeSession, plan: ShardPlan, inputs: Iterable[LocalInput]) -> ShardReceipt:
        receipt = tokenize(session, plan, inputs)
        if plan.number + 1 < num_shards:
            assert ended[plan.number + 1].wait(120)
        order.append(plan.number)
        ended[plan.number].set()
        return receipt

    monkeypatch.setattr(TokenizeSession, "tokenize", tokenize_late)
    return order


def test_same_bytes_with_1_and_16_workers_in_any_order(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = write_batch()
    manifests, order = [], []
    for workers, files_per_download in ((1, 1), (16, 3)):
        monkeypatch.setenv("DFLASH_HOME", str(tmp_path / f"home-{workers}"))
        run = make_run(
            batch,
            dataset=str(tmp_path / f"dataset-{workers}"),
            files_per_shard=1,
            num_workers=workers,
            files_per_download=files_per_download,
        )
        if workers > 1:
            order = finish_in_reverse(monkeypatch, num_shards=5)
        run_flow(run)
        manifests.append(current(run.dataset))
    assert order == [4, 3, 2, 1, 0]
    assert manifests[0].digest == manifests[1].digest
    assert [entry.sha256 for entry in manifests[0].shards] == [entry.sha256 for entry in manifests[1].shards]


def test_failed_shards_are_named_and_only_they_are_made_again(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter, home: Path
) -> None:
    batch = write_batch()
    run = make_run(batch)
    bad = [batch / "part-00001.jsonl", batch / "part-00003.jsonl"]
    good = {path: path.read_bytes() for path in bad}
    for path in bad:
        path.write_bytes(b"not json\n" * 3)
    with pytest.raises(ShardFailedError, match=r"2 of 5 shards failed(.|\n)*shard-00001(.|\n)*shard-00003"):
        run_flow(run)
    assert DatasetRoot.open(run.dataset).current() is None
    kept = {path: path.stat().st_mtime_ns for path in (home / "work" / "spool").glob("*/*/receipt.json")}
    assert len(kept) == 3
    for path, data in good.items():
        path.write_bytes(data)
    from flows.tokenize_completions import tokenize_shard_flow

    assert tokenize_shard_flow(ShardRun(run=run, shard="shard-00001"))["rows"] == 12
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert run_flow(run)["rows"] == 60


def test_rerun_of_a_published_batch_changes_nothing(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter
) -> None:
    run = make_run(write_batch())
    first = run_flow(run)
    pointer = (Path(run.dataset) / "state.json").read_bytes()
    again = run_flow(run)
    assert again["manifest"] == first["manifest"]
    assert again["bytes_uploaded"] == 0
    assert (Path(run.dataset) / "state.json").read_bytes() == pointer


def test_another_batch_is_refused_by_a_root_that_holds_one(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter, example_records: Records
) -> None:
    run_flow(make_run(write_batch()))
    other = write_batch(example_records[60:120], name="other")
    with pytest.raises(DatasetError, match=r"already holds v000001-\w+ \(60 rows\)(.|\n)*dflash merge"):
        run_flow(make_run(other))


def test_the_six_token_incident_is_stopped(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter, example_records: Records
) -> None:
    """87 % of the records have null content and the trace in a field that no template reads."""
    records = [json.loads(json.dumps(record)) for record in example_records[:100]]
    for record in records[:87]:
        answer = record["messages"][-1]
        answer["inner_monologue"], answer["content"] = answer["content"], None
        del record["output_token_ids"], record["prompt_token_ids"]
    run = make_run(write_batch(records))
    with pytest.raises(GateError, match="empty_response") as caught:
        run_flow(run)
    assert "0.87" in str(caught.value) or "87" in str(caught.value)
    assert DatasetRoot.open(run.dataset).current() is None


def test_masks_that_disagree_with_output_tokens_are_stopped(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter, example_records: Records
) -> None:
    records = [json.loads(json.dumps(record)) for record in example_records[:60]]
    for record in records:
        del record["output_token_ids"], record["prompt_token_ids"]
        record["output_tokens"] = record["output_tokens"] * 3
    run = make_run(write_batch(records))
    with pytest.raises(GateError, match="output_tokens"):
        run_flow(run)
    override = run.gate.model_copy(update={"override_reason": "counts come from another tokenizer"})
    assert run_flow(run.model_copy(update={"gate": override}))["gate_override_reason"] is not None


@pytest.mark.parametrize("source", ["bucket/completions", "missing-folder"])
def test_a_source_that_is_no_folder_and_no_s3_uri_is_refused(make_run: Callable[..., TokenizeRun], source: str) -> None:
    with pytest.raises(UsageError, match=rf"{source}(.|\n)*s3://"):
        run_flow(make_run(source))


def test_an_empty_prefix_is_named(make_run: Callable[..., TokenizeRun], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no completions")
    with pytest.raises(UsageError, match=r"No completions under .*empty(.|\n)*notes.txt"):
        run_flow(make_run(tmp_path / "empty"))


def test_a_killed_run_is_finished_by_the_next(
    make_run: Callable[..., TokenizeRun], write_batch: BatchWriter, home: Path, tmp_path: Path
) -> None:
    run = make_run(write_batch())
    parameters = tmp_path / "run.json"
    parameters.write_text(run.model_dump_json())
    code = (
        "from dflash.config import TokenizeRun; from flows.tokenize_completions import tokenize_completions;"
        f"tokenize_completions(TokenizeRun.model_validate_json(open({str(parameters)!r}).read()))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(spooled(home)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = spooled(home)
    assert run_flow(run)["rows"] == 60
    assert len(done) >= 2
