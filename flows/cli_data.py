"""Commands on completions and datasets: tokenize, inspect, verify."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dflash.config import TokenizeRun
from dflash.errors import DamagedDatasetError
from flows.connection import cache, orchestrator, store_credentials
from flows.parameters import load_parameters

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with the flow's parameters.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="One parameter, such as options.max_seq_len=4096; repeatable.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; the rest goes to stderr.")]
DatasetArgument = Annotated[str, typer.Argument(help="Dataset root: s3://bucket/prefix or a local folder.")]


def tokenize_command(
    config: ConfigFile = None,
    setting: Settings = None,
    source: Annotated[str | None, typer.Option(help="Folder of completions: s3://... or a local folder.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset root to publish.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id of the target's tokenizer.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokenize a batch of completions, judge it, and publish it as version 1 of a dataset."""
    named = {"source": source, "dataset": dataset, "tokenizer": tokenizer}
    run = load_parameters(TokenizeRun, config, setting or [], named)
    with orchestrator():
        from flows.progress import listener
        from flows.tokenize_completions import tokenize_completions

        quiet_prefect()
        with progress_bar() as show:
            token = listener.set(show)
            try:
                result = tokenize_completions(run)
            finally:
                listener.reset(token)
    print_result(result, as_json=as_json)


def inspect_command(
    dataset: DatasetArgument,
    sample_id: Annotated[str | None, typer.Option("--id", help="Sample id.")] = None,
    sample: Annotated[int, typer.Option("--sample", help="Sample number in dataset order, from 0.")] = 0,
    version: Annotated[str | None, typer.Option(help="Version; the current one by default.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer; by default the one in the manifest.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print one sample: loss tokens coloured, special tokens visible."""
    from dflash.data.dataset import DatasetRoot
    from dflash.data.inspect import load_sample, render_sample
    from dflash.data.tokenizer import load_tokenizer

    root = DatasetRoot.open(dataset, store_credentials(), cache())
    manifest = root.manifest(version)
    found = load_sample(root, manifest, sample if sample_id is None else sample_id)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), ensure_ascii=False) + "\n")
        return
    console = Console()
    loaded = load_tokenizer(tokenizer or manifest.tokenizer.name)
    console.print(render_sample(found, loaded, colour=console.is_terminal))


def verify_command(
    dataset: DatasetArgument,
    version: Annotated[str | None, typer.Option(help="Version; the current one by default.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Re-read every shard against the manifest; exit code 1 names what is damaged."""
    from dflash.data.dataset import DatasetRoot
    from dflash.data.verify import verify_dataset

    root = DatasetRoot.open(dataset, store_credentials(), cache())
    report = verify_dataset(root, root.manifest(version))
    if as_json:
        print_result(report.to_json(), as_json=True)
    elif not report.problems:
        sys.stdout.write(f"{report.describe()}\n")
    if report.problems:
        raise DamagedDatasetError(report.describe())


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A bar on stderr that shows what `flows.progress.Progress` counts."""
    columns = (TextColumn("{task.fields[step]}"), BarColumn(), TextColumn("{task.fields[line]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        bar_id = bar.add_task("run", total=100.0, step="planning", line="")

        def show(progress: Any) -> None:
            line = progress.describe().partition(": ")[2]
            bar.update(bar_id, completed=progress.percent, step=progress.step, line=line)

        yield show


def quiet_prefect() -> None:
    """Keep Prefect's line a task run out of the shell; warnings and errors stay, the server has all of them."""
    for name in ("prefect.task_runs", "prefect.flow_runs"):
        logging.getLogger(name).setLevel(logging.WARNING)


def print_result(result: dict[str, Any], *, as_json: bool) -> None:
    """Print a result: one JSON object, or a line for each entry."""
    if as_json:
        sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name:>22}  {value}\n")
