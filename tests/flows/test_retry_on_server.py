"""Three shards of twenty fail on a real server with a real worker; exactly these are made again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import psutil
import pytest

from dflash.config import ShardRun, TokenizeRun
from dflash.data.plan import list_completions, plan_shards
from dflash.data.tokenizer import load_tokenizer
from dflash.storage import open_store
from tests.flows.server import Server, wait_for
from tests.flows.small_runs import small_run

if TYPE_CHECKING:
    from embedded.stack import StackConnection

pytestmark = pytest.mark.slow

NUM_SHARDS = 20
GARBAGE, HUGE, SECRET = 4, 9, 15  # shards: unreadable object, killed process, no right to read
NUM_HUGE_ROWS = 1_500
NAMES = {f"shard-{number:05d}" for number in (GARBAGE, HUGE, SECRET)}


@pytest.fixture
def server(stack: StackConnection) -> Server:
    return Server.of(stack)


@pytest.fixture
def batch(stack: StackConnection, example_records: list[dict[str, Any]]) -> dict[str, bytes]:
    """Twenty files of three rows on the object store, one of them huge; returns their content by key."""
    files = {}
    for number in range(NUM_SHARDS):
        rows = example_records[3 * number : 3 * number + 3]
        if number == HUGE:
            rows = [rows[n % 3] | {"id": f"huge-{n}"} for n in range(NUM_HUGE_ROWS)]
        files[f"part-{number:05d}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return files


def put_batch(stack: StackConnection, name: str, files: dict[str, bytes], tokenizer: Path) -> TokenizeRun:
    """Put the files on the store; return a run over them, a shard a file."""
    place = f"s3://{stack.bucket}/{name}"
    run = small_run(f"{place}/completions", f"{place}/train", tokenizer)
    store = open_store(run.source, stack.s3)
    for key, data in files.items():
        store.put_if_absent(key, data)
    return run


def replace(stack: StackConnection, run: TokenizeRun, number: int, data: bytes) -> None:
    store, key = open_store(run.source, stack.s3), f"part-{number:05d}.jsonl"
    store.replace(key, data, if_match=store.head(key).etag)


@contextmanager
def no_right_to_read(stack: StackConnection, run: TokenizeRun, number: int) -> Iterator[None]:
    """A bucket policy that refuses one object to everybody."""
    secret = stack.s3.secret_access_key
    assert secret is not None
    client = boto3.client(
        "s3",
        endpoint_url=stack.s3.endpoint_url,
        region_name=stack.s3.region,
        aws_access_key_id=stack.s3.access_key_id,
        aws_secret_access_key=secret.get_secret_value(),
    )
    place = f"{run.source.removeprefix('s3://')}/part-{number:05d}.jsonl"
    deny = {"Effect": "Deny", "Principal": "*", "Action": ["s3:GetObject"], "Resource": [f"arn:aws:s3:::{place}"]}
    client.put_bucket_policy(Bucket=stack.bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    try:
        yield
    finally:
        client.delete_bucket_policy(Bucket=stack.bucket)
        client.close()


@contextmanager
def killer(stack: StackConnection, run: TokenizeRun, number: int) -> Iterator[dict[Path, int]]:
    """Kill every process that writes one shard; yields the pids by the folder in which they wrote."""
    tokenizer = load_tokenizer(run.tokenizer)
    files = list_completions(open_store(run.source, stack.s3))
    plan = plan_shards(files, run, tokenizer.fingerprint, tokenizer.template_fingerprint)[number]
    spool = stack.project / ".dflash" / "work" / "spool"
    killed: dict[Path, int] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for folder in set(spool.glob(f"*/.{plan.fingerprint[:12]}-*")) - killed.keys():
                pid = _find_writer(folder)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    killed[folder] = pid
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


def _find_writer(folder: Path) -> int | None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(item.path).is_relative_to(folder) for item in process.open_files()):
                return process.pid
    return None


def states(rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Shards by what became of them."""
    return {state: {row["shard"] for row in rows if row["state"] == state} for state in ("made", "reused", "failed")}


def test_three_bad_shards_are_named_and_a_retry_makes_exactly_them(
    stack: StackConnection, server: Server, batch: dict[str, bytes], smollm2_tokenizer_dir: Path
) -> None:
    run = put_batch(stack, "retry", batch, smollm2_tokenizer_dir)
    replace(stack, run, GARBAGE, b"\x00\xff no completion\n")
    with no_right_to_read(stack, run, SECRET), killer(stack, run, HUGE) as killed:
        flow_run = server.start("tokenize-completions", run.model_dump(mode="json"))
        ended = server.wait(flow_run)
    assert ended["state"]["type"] == "FAILED", ended["state"]
    message = ended["state"]["message"]
    assert "3 of 20 shards failed" in message
    assert all(name in message for name in NAMES)
    assert len(killed) == 2  # once in the pool, once by itself
    rows = {row["shard"]: row for row in server.table(flow_run, "tokenize-shards")}
    assert states(list(rows.values())) == {"made": rows.keys() - NAMES, "reused": set(), "failed": NAMES}
    assert "expected UTF-8" in rows[f"shard-{GARBAGE:05d}"]["error"]
    assert "died twice" in rows[f"shard-{HUGE:05d}"]["error"]
    assert "access refused" in rows[f"shard-{SECRET:05d}"]["error"]
    assert {row["attempts"] for row in rows.values()} == {1}

    replace(stack, run, GARBAGE, batch[f"part-{GARBAGE:05d}.jsonl"])
    server.retry(flow_run)
    wait_for(lambda: server.api.get(f"/flow_runs/{flow_run}")["run_count"] == 2)
    ended = server.wait(flow_run)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    rows = {row["shard"]: row for row in server.table(flow_run, "tokenize-shards")}
    assert states(list(rows.values())) == {"made": NAMES, "reused": rows.keys() - NAMES, "failed": set()}
    assert all(row["rows"] == (NUM_HUGE_ROWS if name.endswith("09") else 3) for name, row in rows.items())
    assert all(row["tokens"] > 0 for row in rows.values())
    assert all(rows[name]["attempts"] == 2 for name in NAMES)
    assert all(rows[name]["link"].startswith("[task run](http://") for name in NAMES)
    # The secret shard's task never started in the first attempt: its download failed.
    expected = dict.fromkeys((f"tokenize-{name}" for name in rows), 1)
    expected |= {f"tokenize-shard-{number:05d}": 2 for number in (GARBAGE, HUGE)}
    wait_for(lambda: server.executions(flow_run, "tokenize-shard-") == expected, 30)


def test_one_shard_made_by_its_own_deployment_is_found_done_by_the_run(
    stack: StackConnection, server: Server, batch: dict[str, bytes], smollm2_tokenizer_dir: Path
) -> None:
    files = dict(list(batch.items())[:5])
    run = put_batch(stack, "one-shard", files, smollm2_tokenizer_dir)
    replace(stack, run, GARBAGE, b"\x00\xff no completion\n")
    failed = server.wait(server.start("tokenize-completions", run.model_dump(mode="json")))
    assert "1 of 5 shards failed" in failed["state"]["message"]
    replace(stack, run, GARBAGE, files[f"part-{GARBAGE:05d}.jsonl"])
    shard = server.start("tokenize-shard", ShardRun(run=run, shard="shard-00004").model_dump(mode="json"))
    ended = server.wait(shard)
    assert (ended["name"], ended["state"]["type"]) == ("tokenize-shard-00004", "COMPLETED")
    again = server.start("tokenize-completions", run.model_dump(mode="json"))
    assert server.wait(again)["state"]["type"] == "COMPLETED"
    rows = server.table(again, "tokenize-shards")
    assert states(rows) == {"made": set(), "reused": {row["shard"] for row in rows}, "failed": set()}
    assert server.executions(again, "tokenize-shard-") == {}
    wait_for(lambda: server.executions(shard, "tokenize-shard-") == {"tokenize-shard-00004": 1}, 30)
