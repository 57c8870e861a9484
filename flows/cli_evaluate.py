"""Commands on drafters: evaluate, export. Both call the library: a GPU machine needs no server for them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash.errors import UsageError
from dflash.eval.config import EvaluateRun, ExportRun
from flows.cli_data import ConfigFile, JsonFlag, Settings, print_result
from flows.connection import cache, store_credentials
from flows.parameters import load_parameters

if TYPE_CHECKING:
    from dflash.data.tokenizer import TargetTokenizer
    from dflash.eval.job import EvaluationResult
    from dflash.eval.prompts import Prompt
    from dflash.eval.speculate import Decoded


def evaluate_command(
    config: ConfigFile = None,
    setting: Settings = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint, run folder or export; local or s3://.")] = None,
    show: Annotated[str | None, typer.Option(help="Show this prompt's answer, accepted drafts coloured.")] = None,
    show_first: Annotated[bool, typer.Option("--show-first", help="Show the first prompt's answer.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure a drafter on held-out prompts: tau, acceptance, speed, losslessness."""
    run = load_parameters(EvaluateRun, config, setting or [], {"checkpoint": checkpoint})
    from dflash.eval.job import evaluate_run

    shower = _Shower(show, Console(stderr=as_json), first=show_first)
    result = evaluate_run(run, store_credentials(), cache(), shower)
    shower.finish()
    if as_json:
        sys.stdout.write(json.dumps(result.summary() | {"record": result.record.model_dump(mode="json")}) + "\n")
    else:
        print_evaluation(result, Console())
    result.enforce()


def export_command(
    setting: Settings = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint or run folder; local or s3://.")] = None,
    output: Annotated[str | None, typer.Option(help="New folder or s3:// prefix.")] = None,
    layout: Annotated[str | None, typer.Option("--format", help="sglang, vllm or speculators.")] = None,
    without_evaluation: Annotated[
        bool, typer.Option("--without-evaluation", help="Export although nobody measured this drafter.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a drafter in the layout that servers load, read back and compared, with a model card."""
    named = {
        "checkpoint": checkpoint,
        "output": output,
        "format": layout,
        "without_evaluation": without_evaluation or None,
    }
    run = load_parameters(ExportRun, None, setting or [], named)
    from dflash.eval.export_job import export_run

    print_result(export_run(run, store_credentials(), cache()).to_json(), as_json=as_json)


def print_evaluation(result: EvaluationResult, console: Console) -> None:
    """Write an evaluation as tables."""
    from dflash.eval.table import HEADERS, acceptance_rows, losslessness, tau_rows

    report = result.record.report
    console.print(_table(HEADERS, tau_rows(report)))
    console.print(_table(("slot", "accepted"), acceptance_rows(report)))
    console.print(f"tau: {report.definition}", markup=False)
    console.print(losslessness(report), markup=False)
    console.print(f"written to {result.uri}", markup=False)


class _Shower:
    """Prints one prompt's answer in colours as soon as it is decoded."""

    def __init__(self, wanted: str | None, console: Console, *, first: bool) -> None:
        self._wanted = wanted
        self._first = first and wanted is None
        self._console = console
        self._is_done = False

    def __call__(self, prompt: Prompt, decoded: Decoded, tokenizer: TargetTokenizer) -> None:
        if self._is_done or not (self._first or prompt.id == self._wanted):
            return
        from dflash.eval.coloured import render

        self._console.print(f"prompt {prompt.id} ({prompt.source})", style="bold", markup=False)
        self._console.print(render(decoded, tokenizer))
        self._is_done = True

    def finish(self) -> None:
        """Say so if the prompt was not among those decoded."""
        if self._wanted is not None and not self._is_done:
            raise UsageError(f"--show {self._wanted}: no prompt with this id was evaluated. Look at `id` and `limit`.")


def _table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(*headers, box=None, pad_edge=False, padding=(0, 1))  # nine columns in 80 characters
    for row in rows:
        table.add_row(*row)
    return table
