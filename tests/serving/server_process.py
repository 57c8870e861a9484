"""`dflash serve` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(target: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its base URL and the process, which is gone behind this block."""
    command = [str(Path(sys.executable).with_name("dflash")), "serve", str(target), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
