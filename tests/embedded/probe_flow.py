"""A flow for the tests of the stack: starts a child in a session of its own, as a training does, and waits."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from prefect import flow


@flow(name="probe")
def probe(seconds: float = 0.0) -> dict[str, str]:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    Path("child.pid").write_text(str(child.pid))
    try:
        time.sleep(seconds)
    finally:
        child.kill()
        child.wait()
    return {"folder": str(Path.cwd())}
