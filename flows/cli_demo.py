"""Command `dflash demo`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from flows.cli_data import JsonFlag
from flows.connection import project


def demo_command(
    generate: Annotated[
        bool, typer.Option("--generate", help="The loop instead: generate, tokenize, merge, train, evaluate.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run the whole path on real input, on servers started for it; takes minutes and opens nothing."""
    from flows.demo import run_demo
    from flows.demo_generate import run_generate_demo

    result = (run_generate_demo if generate else run_demo)(project(), Console(stderr=as_json))
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
