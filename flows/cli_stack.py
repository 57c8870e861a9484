"""Commands `up`, `down` and `status` of the embedded stack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from embedded import stack

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress goes to stderr.")]
Project = Annotated[
    Path,
    typer.Option(
        "--project", exists=True, file_okay=False, help="Project folder; the stack's state is kept in its `.dflash/`."
    ),
]
Deployments = Annotated[
    Path, typer.Option("--deployments", exists=True, dir_okay=False, help="Prefect deployments file to apply.")
]

_DATABASE: dict[bool, Literal["sqlite", "postgres"]] = {True: "postgres", False: "sqlite"}

WHAT_TO_CLICK = """
Open {ui_url}
  Deployments > tokenize-completions > Run > Custom run: fill in the form, then Submit
  Runs > the run > Task Runs, Artifacts (progress, shard table, quality report); Retry redoes only what is missing
`dflash status` shows each part, `dflash down` ends them all; data and ports stay in {project}/.dflash
"""


Postgres = Annotated[
    bool | None,
    typer.Option(
        "--postgres/--sqlite",
        help="Database of the Prefect server; kept by later calls. PostgreSQL has to be installed.",
        show_default=False,
    ),
]


def up(
    project: Project = Path(),
    deployments: Deployments = stack.DEPLOYMENTS,
    postgres: Postgres = None,
    as_json: Json = False,
) -> None:
    """Start the object store, Prefect server, workers and deployments; repair what doesn't run."""
    status_now = stack.up(project, _say, deployments, database=None if postgres is None else _DATABASE[postgres])
    if as_json:
        _print_json(status_now)
    elif status_now.ui_url is not None:
        _say(WHAT_TO_CLICK.format(ui_url=status_now.ui_url, project=status_now.project))
    if not status_now.is_healthy:
        _say("a part died while the others were started; `dflash status` shows which, `dflash up` repairs it")
        raise typer.Exit(1)


def down(project: Project = Path(), as_json: Json = False) -> None:
    """End every process of the stack; data, credentials and ports stay."""
    stack.down(project, _say)
    if as_json:
        _print_json(stack.status(project))


def status(project: Project = Path(), as_json: Json = False) -> None:
    """Show each part with process, port and health; exit code 1 if one doesn't work."""
    status_now = stack.status(project)
    if as_json:
        _print_json(status_now)
    elif not status_now.parts:
        _say(f"no stack was started in {status_now.project}; `dflash up` starts one")
    else:
        Console().print(_table(status_now))
    if not status_now.is_healthy:
        raise typer.Exit(1)


def _table(status_now: stack.StackStatus) -> Table:
    table = Table(title=f"Stack of {status_now.project}, UI {status_now.ui_url}")
    for column in ("part", "health", "pid", "port"):
        table.add_column(column)
    for part in status_now.parts:
        colour = "green" if part.health == "healthy" else "red"
        table.add_row(part.name, f"[{colour}]{part.health}[/]", str(part.pid or "-"), str(part.port or "-"))
    return table


def _print_json(status_now: stack.StackStatus) -> None:
    parts = [
        {"name": part.name, "health": part.health, "pid": part.pid, "port": part.port} for part in status_now.parts
    ]
    document = {
        "project": str(status_now.project),
        "healthy": status_now.is_healthy,
        "ui_url": status_now.ui_url,
        "parts": parts,
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
