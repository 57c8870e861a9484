"""`dflash serve` as a process of its own, for loops that need a target behind HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dflash.errors import ServiceError


def start_model_server(target: Path, log: Path, *, port: int = 0) -> tuple[str, subprocess.Popen[str]]:
    """Start it and wait until it answers.

    Args:
        target: folder of the model.
        log: gets what the server says, behind what is there.
        port: to listen at; 0 takes a free one.

    Returns:
        Its address, and the process, which the caller ends.

    Raises:
        ServiceError: it did not come up; names its log.
    """
    command = [str(Path(sys.executable).with_name("dflash")), "serve", str(target), "--port", str(port)]
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ServiceError(f"dflash serve ended with code {process.wait()} before it was ready. See {log}.")
    return json.loads(line)["url"], process
