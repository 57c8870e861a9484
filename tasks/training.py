"""Tasks of the training flows: the version of a run, the trainer process, children on other pools."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from prefect import task
from prefect.cache_policies import INPUTS, RUN_ID
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from dflash.data.dataset import DatasetRoot
from dflash.errors import TrainingError, UsageError
from dflash.train.launch import Trainer
from dflash.train.run import TrainRun
from tasks.policies import STORE_TASK
from tasks.settings import s3_credentials, settings

log = logging.getLogger(__name__)
CHILD_POLL_S = 2.0
_OUR_LINE = re.compile(r"(INFO|WARNING|ERROR) dflash\S* ")

# The one thing that Prefect keeps for a run: a retry must train on the version that the first attempt resolved.
_ONCE_A_FLOW_RUN: dict[str, Any] = STORE_TASK | {
    "cache_policy": INPUTS + RUN_ID,
    "persist_result": True,
    "result_serializer": "json",
}


@task(name="resolve-version", **_ONCE_A_FLOW_RUN)
def resolve_version(dataset: str, version: str | None) -> str:
    """Name of the version to train on; a retry of the flow run gets the same one, whatever was merged meanwhile."""
    return DatasetRoot.open(dataset, s3_credentials(), settings().cache).manifest(version).name


@task(name="check-training", **STORE_TASK)
def check_training(run: TrainRun) -> dict[str, Any]:
    """Check data, target and drafter against each other, without weights and without torch."""
    from dflash.train.preflight import prepare

    ready = prepare(run, DatasetRoot.open(run.dataset, s3_credentials(), settings().cache))
    counts = ready.manifest.counts
    return {"manifest": ready.manifest.name, "rows": counts.num_rows, "tokens": counts.num_tokens}


def start_trainer(run: TrainRun) -> Trainer:
    """A trainer of this machine, with this process's credentials and none of Prefect's variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return Trainer(run, settings().work, s3_credentials(), environment)


@dataclass(slots=True)
class LogForwarder:
    """Repeats the trainer's own lines in the flow run's log."""

    path: Path
    _offset: int = field(default=0, init=False)

    def __call__(self) -> None:
        """Forward what was written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if match := _OUR_LINE.match(line):
                log.log(logging.getLevelNamesMapping()[match[1]], "%s", line[match.end() :])


def run_child(deployment: str, config: dict[str, Any], key: str, flow_run_id: str, run_count: int) -> None:
    """Run a deployment on its own pool and wait; one that an earlier attempt of the parent started is waited for.

    Each attempt of the parent may start one child. A child of an earlier attempt that still runs, or has completed, is
    taken: a parent that crashed doesn't start a second training. What it did is read from the store
    (`tasks.outcomes`): its Prefect result lies on the machine that it ran on.

    Args:
        deployment: `flow-name/deployment-name`.
        config: its parameter.
        key: names the step in the parent.
        flow_run_id: of the parent.
        run_count: attempts of the parent so far.

    Raises:
        UsageError: there is no such deployment.
        TrainingError: the child did not complete; names it and its message.
    """
    keys = [f"{flow_run_id}-{key}-{attempt}" for attempt in range(1, run_count + 1)]
    chosen = choose_key(keys, _runs_of(keys))
    try:
        found = run_deployment(
            deployment, parameters={"config": config}, idempotency_key=chosen, poll_interval=CHILD_POLL_S
        )
    except ObjectNotFound as error:
        raise UsageError(
            f"There is no deployment {deployment}: expected those of deployments/prefect.yaml, see "
            "`prefect deployment ls`. Apply them with `dflash up` or `prefect deploy --all`."
        ) from error
    run = cast("FlowRun", found)
    state = run.state
    if state is None or not state.is_completed():
        raise TrainingError(
            f"{deployment} did not complete: its run {run.name} ({run.id}) is {state.name if state else 'unknown'}: "
            f"{state.message if state else ''}. Mend the cause and retry this run: what is done stays done."
        )


def choose_key(keys: list[str], runs: list[FlowRun]) -> str:
    """The key of the first child that still runs or has completed; that of the newest attempt where there is none."""
    usable = {run.idempotency_key for run in runs if not _is_lost(run)}
    return next((key for key in keys if key in usable), keys[-1])


def _runs_of(keys: list[str]) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=keys))
        return client.read_flow_runs(flow_run_filter=wanted)


def _is_lost(run: FlowRun) -> bool:
    """Whether a run ended without completing."""
    return run.state is None or (run.state.is_final() and not run.state.is_completed())


def every(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Call an action at most once in so many seconds."""
    last = -seconds

    def maybe() -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            action()

    return maybe
