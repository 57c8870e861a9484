"""A tokenizing process, or the one that forks them, may die at any time: the job is done, or fails by name."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dflash.config import TokenizeOptions
from dflash.data.pool import TokenizePool
from dflash.data.spool import LocalInput, ShardJob
from dflash.errors import DatasetError, ShardFailedError, TokenizerError
from dflash.storage.files import file_sha256


def _job(folder: Path, name: str, records: int = 40, content: str = "4 is the answer to it") -> ShardJob:
    path = folder / f"{name}.jsonl"
    record = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": content}]}
    path.write_text((json.dumps(record) + "\n") * records)
    entry = LocalInput(path.name, path, path.stat().st_size, None, file_sha256(path))
    return ShardJob(name * 32, (entry,), TokenizeOptions(), folder / "spool", "huggingface")


@pytest.fixture(scope="module")
def pool(smollm2_tokenizer_dir: Path) -> Iterator[TokenizePool]:
    with TokenizePool(str(smollm2_tokenizer_dir), 2) as pool:
        yield pool


def _source(pool: TokenizePool) -> psutil.Process:
    return psutil.Process(pool._started()._process.pid)


def test_processes_share_one_loaded_tokenizer(tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    pool = TokenizePool(str(smollm2_tokenizer_dir), 2)
    with ThreadPoolExecutor(4) as threads:
        receipts = list(threads.map(pool.run, [_job(tmp_path, name, 300) for name in ("aa", "bb", "cc", "dd")]))
    assert [receipt.num_records for receipt in receipts] == [300] * 4
    workers = _source(pool).children()
    assert 1 <= len(workers) <= 2
    pool.close()
    assert not [worker for worker in workers if worker.is_running()]


def test_record_is_that_of_the_tokenizer(pool: TokenizePool, smollm2_tokenizer_dir: Path) -> None:
    assert pool.tokenizer.name == str(smollm2_tokenizer_dir)
    assert pool.tokenizer.vocab_size == 49_152


def test_a_tokenizer_that_cant_be_used_is_the_pools_error(tmp_path: Path) -> None:
    with TokenizePool(str(tmp_path / "none"), 1) as pool, pytest.raises(TokenizerError, match="No tokenizer folder"):
        _ = pool.tokenizer


def test_what_a_job_raises_comes_with_its_traceback(tmp_path: Path, pool: TokenizePool) -> None:
    with pytest.raises(DatasetError, match="empty_response 3") as caught:
        pool.run(_job(tmp_path, "aa", 3, content=" "))
    assert "In a tokenizing process" in caught.value.__notes__[0]
    assert pool.run(_job(tmp_path, "bb")).num_records == 40


def test_an_idle_worker_that_was_killed_is_replaced(tmp_path: Path, pool: TokenizePool) -> None:
    pool.run(_job(tmp_path, "aa"))
    for _ in range(3):
        for worker in _source(pool).children():
            worker.kill()
        time.sleep(0.1)
        assert pool.run(_job(tmp_path, os.urandom(1).hex())).num_records == 40


def test_a_killed_source_is_replaced(tmp_path: Path, pool: TokenizePool) -> None:
    pool.run(_job(tmp_path, "aa"))
    family = [_source(pool), *_source(pool).children()]
    for process in family:
        process.kill()
    assert pool.run(_job(tmp_path, "bb")).num_records == 40


def test_a_job_that_kills_its_process_fails_by_name_and_others_go_on(tmp_path: Path, pool: TokenizePool) -> None:
    """As a record does that no memory holds: whichever process takes the job dies."""
    stopped = threading.Event()

    def kill_readers() -> None:
        while not stopped.wait(0.002):
            for worker in _source(pool).children():
                try:
                    if any(opened.path.endswith("bad.jsonl") for opened in worker.open_files()):
                        worker.send_signal(signal.SIGKILL)
                except (psutil.Error, OSError):
                    continue

    pool.run(_job(tmp_path, "aa"))
    killer = threading.Thread(target=kill_readers)
    killer.start()
    try:
        with ThreadPoolExecutor(3) as threads:
            bad = threads.submit(pool.run, _job(tmp_path, "bad", 30_000))
            good = [threads.submit(pool.run, _job(tmp_path, name, 500)) for name in ("bb", "cc", "dd")]
            with pytest.raises(ShardFailedError, match=r"bad\.jsonl to bad\.jsonl died twice"):
                bad.result()
            assert [one.result().num_records for one in good] == [500] * 3
    finally:
        stopped.set()
        killer.join()


def test_closing_waits_for_jobs_and_refuses_new_ones(tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    pool = TokenizePool(str(smollm2_tokenizer_dir), 1)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(pool.run, _job(tmp_path, "aa", 2000))
        while not pool._num_workers:
            time.sleep(0.01)
        waiting = threads.submit(pool.run, _job(tmp_path, "bb"))
        time.sleep(0.05)
        pool.close()
        assert running.result().num_records == 2000
        with pytest.raises(ShardFailedError, match="closed"):
            waiting.result()
    with pytest.raises(ShardFailedError, match="closed"):
        pool.run(_job(tmp_path, "cc"))
