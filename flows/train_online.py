"""Flow `train-online`: one training on the machine with the GPUs, as a process of its own.

The trainer runs in its own session. Cancelling ends the flow's process; the trainer is asked to stop, saves a
checkpoint and ends, even if Prefect kills the flow before that. A retry goes on from the checkpoint.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact

from dflash.errors import DflashError, TrainingError
from dflash.train.curves import PICTURE, MetricsTail, describe_step, plot_metrics, read_metrics
from dflash.train.launch import run_dir_of
from dflash.train.run import TrainRun
from flows.progress import ARTIFACT_INTERVAL_S
from flows.run_names import named_after
from tasks.settings import log_to_run, settings
from tasks.training import LogForwarder, every, resolve_version, start_trainer

LOG_INTERVAL_S = 60.0


@flow(name="train-online", flow_run_name=named_after("train", "output"), persist_result=True, result_serializer="json")
def train_online(config: TrainRun) -> dict[str, Any]:
    """Train a drafter online: the target's features are computed as they are needed and never stored.

    Cancel it and it saves a checkpoint; retry it, or run it again with the same output, and it goes on.

    Args:
        config: dataset, target, output and the training itself.

    Returns:
        How it ended, its newest checkpoint, and what it was trained on.
    """
    log_to_run()
    run = config.model_copy(update={"version": resolve_version(config.dataset, config.version)})
    get_run_logger().info("training on %s of %s", run.version, run.dataset)
    run_dir = run_dir_of(run.output, settings().work)
    board = _Board(run_dir)
    try:
        with start_trainer(run) as trainer:
            result = trainer.wait(board.poll(LogForwarder(trainer.log)))
    except DflashError:
        publish_curves(run_dir)
        raise
    publish_curves(run_dir)
    board.show(force=True)
    if result["status"] == "stopped":
        raise TrainingError(
            f"The trainer was stopped from outside at step {result['step']} and saved {result['checkpoint']}. Retry "
            "this run to go on."
        )
    return result


class _Board:
    """Shows the newest step: now and then in the progress artifact, seldom in the log."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = MetricsTail(run_dir)
        self._row: dict[str, Any] | None = None
        self._artifact = cast("UUID", create_progress_artifact(0.0, key="training-progress", description="preparing"))
        self._show = every(ARTIFACT_INTERVAL_S, self.show)
        self._log = every(LOG_INTERVAL_S, self._log_step)

    def poll(self, forward: LogForwarder) -> Any:
        """What to do each time the trainer is looked at."""

        def look() -> None:
            forward()
            row = self._tail.newest()
            if row is not None:
                self._row = row
                self._show()
                self._log()

        return look

    def show(self, *, force: bool = False) -> None:
        """Update the artifact."""
        if self._row is not None:
            line = "finished: " * force + f"step {self._row['step']}, {describe_step(self._row)}"
            update_progress_artifact(self._artifact, 100.0 * self._row["done"], description=line)

    def _log_step(self) -> None:
        assert self._row is not None
        get_run_logger().info("step %d, %s", self._row["step"], describe_step(self._row))


def publish_curves(run_dir: Path) -> None:
    """Put the curves into an artifact; the picture travels inside it, since image artifacts need an address."""
    rows = read_metrics(run_dir)
    if not rows:
        return
    plot_metrics(run_dir, run_dir / PICTURE)
    data = base64.b64encode((run_dir / PICTURE).read_bytes()).decode()
    picture = f"![loss, accuracy, learning rate](data:image/png;base64,{data})"
    last = rows[-1]
    create_markdown_artifact(f"Step {last['step']}, {describe_step(last)}.\n\n{picture}", key="training-curves")
