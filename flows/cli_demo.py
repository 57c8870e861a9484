"""Command `dflash demo`."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from flows.cli_data import JsonFlag
from flows.connection import project


def demo_command(as_json: JsonFlag = False) -> None:
    """Run the whole path on real input, on servers started for it; takes minutes and opens nothing."""
    from flows.demo import run_demo

    result = run_demo(project(), Console(stderr=as_json))
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
