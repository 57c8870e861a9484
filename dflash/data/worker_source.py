"""A process that loads a tokenizer once and forks the processes that tokenize.

Forking is safe there and only there: the process is started fresh, has no threads of its own (the encoders are told
to start none), and never opens an object store, whose client hangs in forked children.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dflash.data.spool import ShardJob
from dflash.data.without_pandas import start_arrow
from dflash.manifest import TokenizerRecord

if TYPE_CHECKING:
    from dflash.data.tokenizer import TargetTokenizer

_ENVIRONMENT = {
    # Read when a process first encodes. One process a core: more threads would only fight for the cores.
    "RAYON_NUM_THREADS": "1",
    "FASTOKENS_BPE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    # Read when it starts: large pages for the half gigabyte of the fast encoder's tables, where the kernel has them.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_PROGRAM = "import sys; from dflash.data.worker_source import serve; serve(*map(int, sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process answers: a result, or what was raised."""

    result: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        """The result.

        Raises:
            BaseException: what was raised there, with its traceback as a note.
        """
        if self.error is not None:
            raise self.error
        return self.result


class WorkerSource:
    """The parent's side: knows the tokenizer, forks workers on demand.

    Attributes:
        record: of the tokenizer, for the manifest.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: Connection, lifeline: int) -> None:
        """Use `start`."""
        self._process = process
        self._control = control
        self._lifeline = lifeline
        self._forking = threading.Lock()
        self.record: TokenizerRecord

    @classmethod
    def start(cls, tokenizer: str, trust_remote_code: bool) -> Self:
        """Start the process and wait until it has loaded the tokenizer.

        A plain process, not one of `multiprocessing`, which would import the parent's main module there: Prefect's.

        Raises:
            TokenizerError: it can't be used.
            EOFError: the process died.
        """
        control, theirs = multiprocessing.Pipe()
        watched, lifeline = os.pipe()
        with theirs, os.fdopen(watched):
            handles = (theirs.fileno(), watched)
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, handles)], pass_fds=handles, env=os.environ | _ENVIRONMENT
            )
        source = cls(process, control, lifeline)
        try:
            control.send((tokenizer, trust_remote_code))
            source.record = control.recv().get()
        except BaseException:
            source.close()
            raise
        return source

    def fork(self, *, fast_encoder: bool) -> Connection:
        """A new worker: send it a `ShardJob`, receive an `Outcome`; it ends when the connection is closed.

        Args:
            fast_encoder: build and prove the fast encoder, once, before forking.

        Raises:
            EOFError, ConnectionError: the process died.
        """
        with self._forking:
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                try:
                    self._control.send(fast_encoder)
                    send_handle(self._control, theirs.fileno(), self._process.pid)
                    self._control.recv().get()  # it has the handle, so that ours may be closed
                except BaseException:
                    ours.close()
                    raise
        return ours

    def close(self) -> None:
        """End the process, once its workers have ended: each does when its connection is closed."""
        self._control.close()
        self._process.wait()
        os.close(self._lifeline)


def ask(worker: Connection, job: ShardJob) -> Outcome:
    """Have a worker do a job.

    Raises:
        EOFError, ConnectionError: it died.
    """
    worker.send(job)
    outcome: Outcome = worker.recv()
    return outcome


def serve(control_handle: int, lifeline: int) -> None:
    """Load, then fork whenever asked, until the parent closes the connection or ends.

    Args:
        control_handle: of a connection that brings the tokenizer's name and, for each worker, whether it needs the
            fast encoder, and its handle.
        lifeline: read end of a pipe that only the parent writes to, so that it ends when the parent does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    # Looking for cycles takes half a second while the vocabulary is read, and in a worker as long as making a job's
    # records does, which hold none. Workers collect between jobs.
    gc.disable()
    start_arrow()
    with Connection(control_handle) as control, contextlib.suppress(EOFError, OSError):
        name, trust_remote_code = control.recv()
        tokenizer = _load(name, trust_remote_code, control)
        while tokenizer is not None:
            fast_encoder, handle = control.recv(), recv_handle(control)
            if fast_encoder:
                tokenizer.prepare_encoder()
            gc.freeze()  # else each worker's collector would copy the pages that they share
            if os.fork() == 0:
                control.close()
                _work(Connection(handle), lifeline, tokenizer)
            os.close(handle)
            control.send(Outcome())
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _load(name: str, trust_remote_code: bool, control: Connection) -> TargetTokenizer | None:
    from dflash.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        outcome = Outcome(tokenizer.record)
    except Exception as error:  # noqa: BLE001 (raised again by the parent)
        control.send(_failed(error))
        return None
    control.send(outcome)
    return tokenizer


def _work(connection: Connection, lifeline: int, tokenizer: TargetTokenizer) -> NoReturn:
    """Do jobs until the connection is closed; never returns into the code that was forked."""
    try:
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        while True:
            job = connection.recv()
            connection.send(_done(job, tokenizer))
            gc.collect()
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:  # noqa: BLE001 (a worker that can't answer has to die, which the parent reports)
        traceback.print_exc()
        os._exit(1)


def _done(job: ShardJob, tokenizer: TargetTokenizer) -> Outcome:
    from dflash.data.shard_job import run_shard_job

    try:
        return Outcome(run_shard_job(job, tokenizer))
    except Exception as error:  # noqa: BLE001 (raised again by the parent)
        return _failed(error)


def _failed(error: Exception) -> Outcome:
    error.add_note("In a tokenizing process:\n" + "".join(traceback.format_exception(error)))
    return Outcome(error=error)


def _end_with_parent(lifeline: int) -> None:
    """Wait for the end of the process that owns the pool; a killed one can't tell its workers to stop."""
    os.read(lifeline, 1)
    os._exit(1)
