"""A warm pool of tokenizing processes that outlives the crash of any of them.

Processes because rendering holds the interpreter lock; spawned because the object store client and the encoder hang
in forked children; warm because loading a tokenizer costs seconds.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dflash.data.shard_job import ShardJob, run_shard_job
from dflash.errors import ShardFailedError
from dflash.manifest import ShardReceipt

if TYPE_CHECKING:
    from dflash.data.tokenizer import TargetTokenizer

log = logging.getLogger(__name__)


class TokenizePool:
    """Runs shard jobs in processes that each hold the tokenizer; safe to call from many threads.

    Args:
        tokenizer: folder or hub id.
        num_workers: processes; 0 takes one for each core this process may use.
        trust_remote_code: passed to the tokenizer's loader.
    """

    def __init__(self, tokenizer: str, num_workers: int = 0, *, trust_remote_code: bool = False) -> None:
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._arguments = (tokenizer, trust_remote_code)
        self._lock = threading.Lock()
        self._alone = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, job: ShardJob) -> ShardReceipt:
        """Run one job and wait for it.

        Raises:
            ShardFailedError: the process died under this job each time.
            DflashError: what the job itself raised.
        """
        executor = self._current()
        try:
            return executor.submit(_run_in_worker, job).result()
        except BrokenProcessPool:
            log.warning("a tokenizing process died while shard %s was in work", job.fingerprint[:12])
            self._retire(executor)
        return self._run_alone(job)

    def _run_alone(self, job: ShardJob) -> ShardReceipt:
        """Try again in a process of its own, since a broken pool can't tell which job in flight killed it.

        One at a time: what ran out of memory side by side may fit alone.
        """
        executor = self._new_executor(1)
        try:
            with self._alone:
                return executor.submit(_run_in_worker, job).result()
        except BrokenProcessPool as error:
            raise ShardFailedError(
                f"The process that tokenized {job.inputs[0].key} to {job.inputs[-1].key} died twice. "
                "Expected it to finish; it was killed or ran out of memory. "
                "Lower num_workers or files_per_shard, look for a huge record, then retry the run."
            ) from error
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the processes; jobs that have not started are dropped."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    def _current(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._closed:
                raise ShardFailedError("The tokenizing pool is closed: its run has ended or was cancelled.")
            if self._executor is None:
                self._executor = self._new_executor(self.num_workers)
            return self._executor

    def _new_executor(self, num_workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=self._arguments,
        )

    def _retire(self, broken: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._executor is broken:
                self._executor = None
        broken.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """State of one worker process: the tokenizer, loaded once."""

    tokenizer: TargetTokenizer | None = None


def _end_with_parent() -> None:
    """Wait for the end of the process that owns the pool; a killed one can't tell its workers to stop."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _start_worker(tokenizer: str, trust_remote_code: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from dflash.data.tokenizer import load_tokenizer

    # Read when the process first encodes. One process a core: more threads would only fight for the cores.
    os.environ |= {"RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    _Worker.tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code, probe=False)


def _run_in_worker(job: ShardJob) -> ShardReceipt:
    assert _Worker.tokenizer is not None, "the pool's initializer ran"
    return run_shard_job(job, _Worker.tokenizer)
