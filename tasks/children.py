"""Flow runs that a flow run starts on another pool and waits for."""

from __future__ import annotations

from typing import Any, cast

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from dflash.errors import ChildRunError, UsageError

CHILD_POLL_S = 2.0


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
        ChildRunError: the child did not complete; names it and its message.
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
        raise ChildRunError(
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
