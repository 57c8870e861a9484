"""Command `dflash train`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dflash.errors import UsageError
from dflash.train.curves import MetricsTail, describe_step
from dflash.train.launch import Trainer, run_dir_of
from dflash.train.run import TrainRun
from dflash.train.stopping import stop_on_signal
from flows.cli_data import ConfigFile, JsonFlag, Settings, print_result
from flows.connection import home, store_credentials
from flows.parameters import load_parameters

OnStep = Callable[[dict[str, Any] | None], None]


def train_command(
    config: ConfigFile = None,
    setting: Settings = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset root: s3://... or a local folder.")] = None,
    output: Annotated[str | None, typer.Option(help="Run folder; the same command goes on from what is there.")] = None,
    accept_env_change: Annotated[
        bool, typer.Option("--accept-env-change", help="Go on although torch, CUDA or packages changed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a drafter online, or go on; Ctrl-C or SIGTERM saves, and the same command resumes."""
    settings = [*(setting or []), *(["train.accept_env_change=true"] if accept_env_change else [])]
    run = load_parameters(TrainRun, config, settings, {"dataset": dataset, "output": output})
    with _progress() as show:
        result = _train_here(run, show) if run.num_processes == 1 else _train_in_ranks(run, show)
    if result["status"] == "stopped":
        sys.stderr.write(f"stopped at step {result['step']}; the same command goes on from {result['checkpoint']}\n")
    print_result(result, as_json=as_json)


def _train_here(run: TrainRun, show: OnStep) -> dict[str, Any]:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Training needs torch: {error}. Install the extra: pip install 'dflash-pipeline[train]'."
        ) from error
    from dflash.model.device import choose_device
    from dflash.train.job import Places, Watch, train_run, use_device

    device = choose_device(run.device)
    use_device(run, device)
    with stop_on_signal(signal.SIGTERM, signal.SIGINT) as asked:
        return train_run(run, Places(home() / "work", store_credentials()), Watch(asked, show), device)


def _train_in_ranks(run: TrainRun, show: OnStep) -> dict[str, Any]:
    work = home() / "work"
    tail = MetricsTail(run_dir_of(run.output, work))
    with (
        stop_on_signal(signal.SIGTERM, signal.SIGINT) as asked,
        Trainer(run, work, store_credentials(), os.environ) as trainer,
    ):

        def look() -> None:
            show(tail.newest())
            if asked():
                trainer.ask_to_stop()

        return trainer.wait(look)


@contextmanager
def _progress() -> Iterator[OnStep]:
    """A bar on stderr."""
    columns = (TextColumn("{task.fields[step]}"), BarColumn(), TextColumn("{task.fields[line]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("train", total=1.0, step="preparing", line="")

        def show(row: dict[str, Any] | None) -> None:
            if row is not None:
                bar.update(task, completed=row["done"], step=f"step {row['step']}", line=describe_step(row))

        yield show
