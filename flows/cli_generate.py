"""Commands `generate` and `regenerate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dflash.generate.config import GenerateRun
from flows.cli_data import ConfigFile, JsonFlag, Settings, print_result, progress_bar, quiet_prefect
from flows.connection import orchestrator
from flows.parameters import load_parameters

Endpoints = Annotated[
    list[str] | None, typer.Option("--endpoint", help="Base URL such as http://host:8000/v1; repeatable.")
]
BatchOption = Annotated[str | None, typer.Option(help="Folder of the new batch: s3://... or local.")]


def generate_command(  # noqa: PLR0913, PLR0917 (the options of a command)
    config: ConfigFile = None,
    setting: Settings = None,
    prompts: Annotated[str | None, typer.Option(help="A .jsonl file, a folder of them, or datasets:NAME.")] = None,
    endpoint: Endpoints = None,
    batch: BatchOption = None,
    only_failed: Annotated[bool, typer.Option("--only-failed", help="Only what failed in the run before.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Let the target answer prompts, each exactly once; run it again to go on after a stop."""
    named = {"prompts": prompts, "endpoints": endpoint or None, "batch": batch, "only_failed": only_failed or None}
    run = load_parameters(GenerateRun, config, setting or [], named)
    with orchestrator():
        from flows.generate_completions import generate_completions

        print_result(_with_progress(generate_completions, run), as_json=as_json)


def _with_progress(flow: Any, run: Any) -> dict[str, Any]:
    """Run a flow in this process with its progress on stderr."""
    from flows.progress import listener

    quiet_prefect()
    with progress_bar() as show:
        token = listener.set(show)
        try:
            result: dict[str, Any] = flow(run)
        finally:
            listener.reset(token)
    return result
