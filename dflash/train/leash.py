"""How a launcher holds its trainer: it asks it to stop, and a trainer whose launcher died stops by itself.

Prefect follows its SIGTERM by SIGKILL half a minute later, which may be too short to save. So a trainer and its ranks
are asked through a file beside the job. A lock that the launcher holds and the kernel frees shows whether it still
lives, however it ended and whatever its process id means by now.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self


class Leash:
    """The launcher's end: held for as long as the trainer may run."""

    def __init__(self, job: Path) -> None:
        self._stop, self._lock = _stop_file(job), _lock_file(job)
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        self._stop.unlink(missing_ok=True)
        self._descriptor = os.open(self._lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)

    def ask_to_stop(self) -> None:
        """Let the trainer save and end after its step."""
        self._stop.touch()


def should_stop(job: Path) -> bool:
    """Tell a trainer whether its launcher asked it to stop, or is gone."""
    if _stop_file(job).exists():
        return True
    try:
        descriptor = os.open(_lock_file(job), os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # started by hand, without a launcher
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _stop_file(job: Path) -> Path:
    return job.with_suffix(".stop")


def _lock_file(job: Path) -> Path:
    return job.with_suffix(".lock")
