"""One shard from files: what is kept, what is refused, what a killed parent leaves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash.config import GateThresholds, TokenizeOptions, TokenizeRun
from dflash.data import tokenize_run
from dflash.data.pool import TokenizePool
from dflash.data.shard_job import run_shard_job
from dflash.data.spool import LocalInput, ShardJob, read_spooled
from dflash.data.tokenize_run import UPLOADS_AT_ONCE, TokenizeSession
from dflash.data.tokenizer import TargetTokenizer, load_tokenizer
from dflash.data.workspace import Workspace
from dflash.errors import DatasetError, IntegrityError, UsageError

RECORD = {"id": "a", "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]}


@pytest.fixture(scope="module")
def tokenizer(smollm2_tokenizer_dir: Path) -> TargetTokenizer:
    return load_tokenizer(smollm2_tokenizer_dir)


def write_input(folder: Path, name: str, data: bytes) -> LocalInput:
    path = folder / name
    path.write_bytes(data)
    return LocalInput(name, path, len(data), None, hashlib.sha256(data).hexdigest())


def make_job(tmp_path: Path, *inputs: LocalInput) -> ShardJob:
    return ShardJob("f" * 64, inputs, TokenizeOptions(), tmp_path / "spool", "huggingface")


def test_empty_files_give_a_shard_without_rows(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    receipt = run_shard_job(make_job(tmp_path, write_input(tmp_path, "empty.jsonl", b"\n\n")), tokenizer)
    assert receipt.shard.num_rows == 0
    assert receipt.reject_reasons == {}


def test_a_group_of_rejects_alone_is_an_error_that_says_why(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    job = make_job(tmp_path, write_input(tmp_path, "bad.jsonl", b"nonsense\n"))
    with pytest.raises(DatasetError, match=r"No usable record(.|\n)*bad\.jsonl:?"):
        run_shard_job(job, tokenizer)
    assert not (tmp_path / "spool" / ("f" * 64)).exists()


def test_good_records_beside_bad_ones_are_kept(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    line = json.dumps(RECORD).encode() + b"\n"
    receipt = run_shard_job(make_job(tmp_path, write_input(tmp_path, "mixed.jsonl", b"{\n" + line)), tokenizer)
    assert receipt.shard.num_rows == 1
    assert sum(receipt.reject_reasons.values()) == 1
    assert receipt.num_records == 2


def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    item = write_input(tmp_path, "a.jsonl", json.dumps(RECORD).encode() + b"\n")
    item.path.write_bytes(item.path.read_bytes().replace(b"2+2", b"3+3"))
    with pytest.raises(IntegrityError, match=r"a\.jsonl\) was changed"):
        run_shard_job(make_job(tmp_path, item), tokenizer)


def test_a_damaged_spool_folder_is_made_again(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    job = make_job(tmp_path, write_input(tmp_path, "a.jsonl", json.dumps(RECORD).encode() + b"\n"))
    first = run_shard_job(job, tokenizer)
    (job.result / "shard.arrow").write_bytes(b"damaged")
    assert read_spooled(job.result) is None
    assert run_shard_job(job, tokenizer) == first
    assert read_spooled(job.result) == first


def test_scratch_of_a_killed_process_is_removed_after_a_day(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    job = make_job(tmp_path, write_input(tmp_path, "a.jsonl", json.dumps(RECORD).encode() + b"\n"))
    old, young = job.spool / ".old", job.spool / ".young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    run_shard_job(job, tokenizer)
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize(("source", "dataset"), [("src", "src/ds"), ("src", "x/../src/ds"), ("ds/shards", "ds")])
def test_places_inside_one_another_are_refused_however_spelled(
    tmp_path: Path, smollm2_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, source: str, dataset: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = TokenizeRun(source=source, dataset=dataset, tokenizer=str(smollm2_tokenizer_dir))
    with (
        TokenizeSession(run, None, Workspace(tmp_path / "work", tmp_path / "cache")) as session,
        pytest.raises(UsageError, match="lie inside one another"),
    ):
        session.plan()


def test_a_spool_folder_that_a_kill_left_in_part_is_no_obstacle(tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    """The shard is stored, its folder half removed: the next run publishes what is stored."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_text(json.dumps(RECORD) + "\n")
    run = TokenizeRun(
        source=str(source), dataset=str(tmp_path / "ds"), tokenizer=str(smollm2_tokenizer_dir), num_workers=1
    )
    with TokenizeSession(run, None, Workspace(tmp_path / "work", tmp_path / "cache")) as session:
        (plan,) = session.plan()
        receipt = session.tokenize(plan, session.download(plan.files))
        folder = session.spool / plan.fingerprint
        index = (folder / "index.arrow").read_bytes()
        session.upload(receipt)
        folder.mkdir()
        (folder / "index.arrow").write_bytes(index)
        assert session.finished([plan]) == {plan.fingerprint: receipt}
        session.upload(receipt)
        assert not folder.exists()
        assert session.publish_first([receipt], session.assess([receipt])).counts.num_rows == 1


def test_few_uploads_run_at_a_time(
    tmp_path: Path, smollm2_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds its shard in memory, and a run has hundreds of threads."""
    together = threading.Barrier(UPLOADS_AT_ONCE)
    running: list[int] = []
    most = 0

    def wait_for_the_others(*_: object) -> None:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        together.wait(60)
        running.pop()

    monkeypatch.setattr(tokenize_run, "put_in_place", wait_for_the_others)
    run = TokenizeRun(source=str(tmp_path), dataset=str(tmp_path / "ds"), tokenizer=str(smollm2_tokenizer_dir))
    with (
        TokenizeSession(run, None, Workspace(tmp_path / "work", tmp_path / "cache")) as session,
        ThreadPoolExecutor(3 * UPLOADS_AT_ONCE) as threads,
    ):
        receipts: list[Any] = [None] * (3 * UPLOADS_AT_ONCE)
        list(threads.map(session.upload, receipts))
    assert most == UPLOADS_AT_ONCE


def test_limits_are_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        GateThresholds(ratio_tolerance=float("inf"))


def test_workers_end_with_a_killed_parent(tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from dflash.data.pool import TokenizePool\n"
        "if __name__ == '__main__':\n"
        "    pool = TokenizePool(sys.argv[1], 1)\n"
        "    worker = pool._started().fork(fast_encoder=False)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(120)\n"
    )
    repository = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(program), str(smollm2_tokenizer_dir)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert children
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(child.is_running() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if child.is_running()]


def test_a_closed_pool_refuses_work(tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    pool = TokenizePool(str(smollm2_tokenizer_dir), 1)
    pool.close()
    with pytest.raises(Exception, match="closed"):
        pool.run(make_job(tmp_path))
