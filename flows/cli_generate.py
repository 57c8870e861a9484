"""Commands on batches of completions: generate, regenerate, spot-check."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from dflash.errors import UsageError
from dflash.generate.config import GenerateRun, RegenerateRun
from dflash.storage import open_store
from flows.cli_data import ConfigFile, JsonFlag, Settings, print_result, progress_bar, quiet_prefect
from flows.connection import orchestrator, store_credentials
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
    _require_aiohttp()
    with orchestrator():
        from flows.generate_completions import generate_completions

        print_result(_with_progress(generate_completions, run), as_json=as_json)


def regenerate_command(
    config: ConfigFile = None,
    setting: Settings = None,
    source: Annotated[str | None, typer.Option(help="A batch folder or a dataset root to look through.")] = None,
    endpoint: Endpoints = None,
    batch: BatchOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Ask again for empty, tiny, cut and rejected records of a batch or a dataset version, into a new batch."""
    named = {"generate.batch": batch, "generate.endpoints": endpoint or None, "generate.prompts": "(what is found)"}
    by_name = [f"{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
    run = load_parameters(RegenerateRun, config, [*by_name, *(setting or [])], {"source": source})
    _require_aiohttp()
    with orchestrator():
        from flows.generate_completions import regenerate_completions

        print_result(_with_progress(regenerate_completions, run), as_json=as_json)


def spot_check_command(
    batch: Annotated[str, typer.Argument(help="Folder of a batch that dflash generate wrote.")],
    as_json: JsonFlag = False,
) -> None:
    """Look at a batch: whole parts, mix, loops, refusals, traces without answers, and samples to read."""
    from dflash.generate.parts import BATCH_LIMITS, BatchLog
    from dflash.generate.report import assess_batch, render_markdown

    log = BatchLog(open_store(batch, store_credentials(), BATCH_LIMITS))
    log.load()
    log.require_published()
    if not log.parts:
        raise UsageError(f"No parts of a batch in {batch}: expected the folder of a batch of dflash generate.")
    log.verify()
    report = assess_batch(log.store, log.counts)
    sys.stdout.write(json.dumps(report.to_json(), ensure_ascii=False) + "\n" if as_json else render_markdown(report))


def _require_aiohttp() -> None:
    """Say how to install what requests need, before servers are started."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Generating needs aiohttp: {error}. Install the extra: pip install 'dflash-pipeline[generate]'."
        ) from error


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
