"""Commands before a run: plan (memory, storage, time) and doctor (what this machine is, and what changed)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash.errors import MemoryPlanError, TrainingError, UsageError
from flows.cli_data import JsonFlag, Settings
from flows.connection import cache, store_credentials
from flows.parameters import load_parameters

# The set that the published drafters were trained on: about 900 thousand rows of about 2,000 tokens.
SAMPLES, TOKENS = 902_000, 2_000.0


def plan_command(
    config: Annotated[Path | None, typer.Option("--config", help="The run's TOML file.")] = None,
    setting: Settings = None,
    device_gb: Annotated[
        float | None, typer.Option("--device-gb", help="Memory of a device in GB (1e9); by default what is here.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Rows of the dataset.")] = SAMPLES,
    tokens: Annotated[float, typer.Option("--tokens", min=1, max=1e9, help="Mean tokens of a row.")] = TOKENS,
    as_json: JsonFlag = False,
) -> None:
    """Show what a run will need, before anything is loaded; exit code 1 where it doesn't fit the device.

    `--set tokens_per_s=X`, from a measurement, adds the time.
    """
    from dflash.train.plan import Amount, PlanRun, advice, known_device_bytes, plan_run, plan_table

    run = load_parameters(PlanRun, config, setting or [], {})
    if device_gb is not None and not 0 < device_gb < float("inf"):
        raise UsageError(f"--device-gb {device_gb:g}: expected the memory of one device in GB, such as 80.")
    device_bytes = known_device_bytes() if device_gb is None else round(device_gb * 1e9)
    amount = Amount(samples, tokens, run.tokens_per_s)
    plan = plan_run(run, amount, device_bytes)
    if as_json:
        sys.stdout.write(json.dumps(plan.to_json() | {"advice": advice(plan)}) + "\n")
    else:
        _print(("what", "how much"), plan_table(plan, amount))
        for line in advice(plan):
            sys.stdout.write(f"change: {line}\n")
    if not plan.fits:
        total, device = plan.memory.total_bytes / 1e9, (plan.device_bytes or 0) / 1e9
        raise MemoryPlanError(f"The run needs {total:.1f} GB on each device, which has {device:.1f} GB.")


def doctor_command(
    run: Annotated[str | None, typer.Option("--run", help="Run folder: compare with its newest checkpoint.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what this machine is; exit code 1 where something is missing, or differs from the run's checkpoint."""
    from dflash.train.doctor import examine

    found = examine(run, store_credentials(), cache())
    if as_json:
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
    else:
        _print(("what", "here"), found.rows())
        if found.changes:
            rows = [(change.name, change.before, change.now) for change in found.changes]
            _print(("what", "checkpoint", "here"), rows)
    if found.problems:
        raise TrainingError("\n".join(found.problems))


def _print(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(*headers)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
