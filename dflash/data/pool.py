"""A warm pool of tokenizing processes that outlives the crash of any of them.

Processes because rendering holds the interpreter lock. All are forked from one that has loaded the tokenizer and has
no other threads (`worker_source`): loading one and building its fast encoder costs seconds and half a gigabyte, which
forked processes share.
"""

from __future__ import annotations

import logging
import os
import threading
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from dflash.data.spool import ShardJob
from dflash.data.worker_source import Outcome, WorkerSource, ask
from dflash.errors import ShardFailedError
from dflash.manifest import ShardReceipt, TokenizerRecord

log = logging.getLogger(__name__)

_DIED = (EOFError, ConnectionError)


class TokenizePool:
    """Runs shard jobs in processes that share a tokenizer; safe to call from many threads.

    Args:
        tokenizer: folder or hub id.
        num_workers: processes; 0 takes one for each core this process may use.
        trust_remote_code: passed to the tokenizer's loader.
    """

    def __init__(self, tokenizer: str, num_workers: int = 0, *, trust_remote_code: bool = False) -> None:
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._arguments = (tokenizer, trust_remote_code)
        self._source: WorkerSource | None = None
        self._starting = threading.Lock()
        self._alone = threading.Lock()
        self._change = threading.Condition()  # guards what follows
        self._idle: list[Connection] = []
        self._num_workers = 0  # that live, idle or not
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> TokenizerRecord:
        """What the manifest records of the tokenizer; loads it.

        Raises:
            TokenizerError: it can't be used.
        """
        return self._started().record

    def run(self, job: ShardJob) -> ShardReceipt:
        """Run one job and wait for it.

        Raises:
            ShardFailedError: the process died under this job each time.
            DflashError: what the job itself raised.
        """
        worker = self._take(job)
        try:
            outcome = ask(worker, job)
        except _DIED:
            log.warning("a tokenizing process died while shard %s was in work", job.fingerprint[:12])
            self._drop(worker)
            outcome = self._run_alone(job)
        except BaseException:  # interrupted: the worker's answer is still to come, and nobody waits for it
            self._drop(worker)
            raise
        else:
            self._give_back(worker)
        receipt: ShardReceipt = outcome.get()
        return receipt

    def _run_alone(self, job: ShardJob) -> Outcome:
        """Try again, one job at a time, in a new process: what ran out of memory side by side may fit alone."""
        with self._alone:
            worker = self._fork(job)
            try:
                return ask(worker, job)
            except _DIED as error:
                raise _died_twice(job) from error
            finally:
                worker.close()

    def close(self) -> None:
        """End the processes, after the jobs that they are at; jobs that have not started are refused."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            self._change.wait_for(lambda: len(self._idle) == self._num_workers)
            for worker in self._idle:
                worker.close()
            self._idle.clear()
            self._num_workers = 0
        with self._starting:
            source, self._source = self._source, None
        if source is not None:
            source.close()

    def _take(self, job: ShardJob) -> Connection:
        """An idle worker, or a new one while there are fewer than `num_workers`."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self._idle or self._num_workers < self.num_workers)
            self._require_open()
            if self._idle:
                return self._idle.pop()
            self._num_workers += 1
        try:
            return self._fork(job)
        except BaseException:
            self._drop(None)
            raise

    def _give_back(self, worker: Connection) -> None:
        with self._change:
            self._idle.append(worker)
            self._change.notify_all()

    def _drop(self, worker: Connection | None) -> None:
        """One worker less: it died, can't be used, or never came to be."""
        if worker is not None:
            worker.close()
        with self._change:
            self._num_workers -= 1
            self._change.notify_all()

    def _fork(self, job: ShardJob) -> Connection:
        cause: Exception | None = None
        for _ in range(2):  # the process that forks may have been killed too; a new one is started then
            source = self._started()
            try:
                return source.fork(fast_encoder=job.encoder == "auto")
            except _DIED as error:
                cause = error
                self._forget(source)
        raise _died_twice(job) from cause

    def _started(self) -> WorkerSource:
        with self._starting:
            self._require_open()
            if self._source is None:
                self._source = WorkerSource.start(*self._arguments)
            return self._source

    def _forget(self, dead: WorkerSource) -> None:
        with self._starting:
            if self._source is dead:
                self._source = None
        dead.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ShardFailedError("The tokenizing pool is closed: its run has ended or was cancelled.")


def _died_twice(job: ShardJob) -> ShardFailedError:
    return ShardFailedError(
        f"The process that tokenized {job.inputs[0].key} to {job.inputs[-1].key} died twice. "
        "Expected it to finish; it was killed or ran out of memory. "
        "Lower num_workers or files_per_shard, look for a huge record, then retry the run."
    )
