"""The mark that all processes of a stack carry, and ending those that carry it.

It is a variable of the environment, inherited by all that a part starts: so flow runs of a killed worker, and parts
whose record was lost by a killed `dflash up`, are still found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import psutil

from embedded.processes import ProcessIdentity, identify_process

MARKER = "DFLASH_STACK"


def find_marked(marker: str) -> list[psutil.Process]:
    """All processes whose environment carries the marker, except this one and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        # Another user's, a kernel thread, or gone meanwhile: not ours.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in own and process.environ().get(MARKER) == marker:
                found.append(process)
    return found


def find_marked_command(marker: str, matches: Callable[[list[str]], bool]) -> ProcessIdentity | None:
    """The first process with the marker whose command line matches: one whose record was lost by a killed `up`."""
    for process in find_marked(marker):
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            if matches(process.cmdline()):
                return identify_process(process.pid)
    return None


def stop_all(processes: Iterable[psutil.Process], *, grace_s: float) -> None:
    """SIGTERM each process, wait up to `grace_s` for all together, SIGKILL the rest."""
    waiting = list(processes)
    for process in waiting:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(waiting, timeout=grace_s)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=10)
