"""What a process that is to be killed runs.

Its parent is a fork server, a process without threads that has imported all this: a child of the test process itself
could inherit a lock that a thread of the stub server held, and one that is started anew imports for seconds.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import dflash.generate.session as session_module
from dflash.generate.config import GenerateRun
from dflash.storage import open_store
from tests.generate.conftest import generate
from tests.storage.faults import FaultPlan, FaultStore

FORKS = multiprocessing.get_context("forkserver")


def run_in_child(run: GenerateRun, work: Path, plan: FaultPlan, watch: Callable[[int], None] = lambda _: None) -> int:
    """Run in a process that shares nothing with this one but files and the server; return its exit code."""
    FORKS.set_forkserver_preload([__name__])
    child = FORKS.Process(target=_run, args=(run, work, plan))
    child.start()
    assert child.pid is not None
    watch(child.pid)
    child.join()
    code = child.exitcode
    child.close()
    assert code is not None
    return code


def _run(run: GenerateRun, work: Path, plan: FaultPlan) -> None:
    session_module.open_store = lambda *_: FaultStore(open_store(run.batch), plan)  # type: ignore[assignment]
    generate(run, work)
