"""One trainer at a time in a run folder of this machine."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import TrainingError

log = logging.getLogger(__name__)


@contextmanager
def hold_folder(run_dir: Path, wait_s: float) -> Iterator[None]:
    """Hold a run folder alone; a trainer that is still saving its last checkpoint is waited for.

    Raises:
        TrainingError: another trainer has the folder for longer than that.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    waiting = False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    log.warning("another trainer works in %s: waiting up to %.0f s for its end", run_dir, wait_s)
                    waiting = True
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"Another trainer has worked in {run_dir} for {wait_s:.0f} s. Let it end, or choose another "
                        "output."
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)
