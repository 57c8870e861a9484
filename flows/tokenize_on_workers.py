"""Flows that tokenize one batch on several machines: `tokenize-on-workers` and `tokenize-on-dask`.

What they share is the store: a shard that is in place there is done, whoever made it. So a run is cut into slices (or
single shards), which any machine makes from the run's parameters alone, and `tokenize-completions` at the end finds all
of them done, judges the batch and publishes it. Whatever is lost on the way, it makes itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from prefect import flow
from prefect.runtime import flow_run as runtime

from dflash.config import ShardRun, SliceRun, SpreadRun
from dflash.data.tokenize_run import TokenizeSession
from dflash.errors import UsageError
from flows.progress import ProgressBoard
from flows.run_names import named_after
from flows.tokenize_completions import RESULT, RUNNER, make_shards, tokenize_completions, upload_all
from tasks.children import run_child
from tasks.settings import log_to_run, s3_credentials, workspace
from tasks.tokenization import list_completions, make_shard_anywhere

SLICE = "tokenize-slice/tokenize-slice"


@flow(
    name="tokenize-slice",
    flow_run_name="slice-{config.slice_number}-of-{config.num_slices}",
    task_runner=RUNNER,
    **RESULT,
)
def tokenize_slice(config: SliceRun) -> dict[str, Any]:
    """Make the shards of one slice that are not there yet, and put them in place.

    Args:
        config: the run's parameters, and which slice of it.

    Returns:
        Counts of the slice.
    """
    log_to_run()
    board = ProgressBoard(key="tokenize-progress")
    with TokenizeSession(config.run, s3_credentials(), workspace()) as session:
        plans = list_completions(session)[config.slice_number :: config.num_slices]
        receipts = make_shards(session, plans, board) if plans else []
        sent = upload_all(session, receipts)
        board.show(force=True)
    return {
        "shards": len(receipts),
        "rows": sum(receipt.shard.num_rows for receipt in receipts),
        "tokens": sum(receipt.shard.num_tokens for receipt in receipts),
        "bytes_uploaded": sent,
    }


@flow(name="tokenize-on-workers", flow_run_name=named_after("tokenize", "run", "source"), **RESULT)
def tokenize_on_workers(config: SpreadRun) -> dict[str, Any]:
    """Tokenize a batch on all workers of the pool, on as many machines as they run on.

    Each slice is a run of the deployment `tokenize-slice`. Retry this run after a failure: what is done stays done.

    Args:
        config: the run, and the number of slices.

    Returns:
        As `tokenize-completions`.

    Raises:
        ChildRunError: a slice did not complete.
    """
    log_to_run()
    parent, attempt = str(runtime.id), runtime.run_count

    def run_slice(number: int) -> None:
        child = SliceRun(run=config.run, num_slices=config.num_slices, slice_number=number)
        run_child(SLICE, child.model_dump(mode="json"), f"slice-{number}", parent, attempt)

    with ThreadPoolExecutor(config.num_slices) as threads:
        waiting = [threads.submit(copy_context().run, run_slice, number) for number in range(config.num_slices)]
        for one in waiting:
            one.result()
    return tokenize_completions(config.run)


def tokenize_on_dask(config: SpreadRun) -> dict[str, Any]:
    """Tokenize a batch on a Dask cluster, a task a shard; needs the extra `scale`.

    Args:
        config: the run; the cluster is `scheduler`'s, or one of `num_slices` processes on this machine.

    Returns:
        As `tokenize-completions`.

    Raises:
        UsageError: the extra isn't installed.
    """
    try:
        from prefect_dask import DaskTaskRunner
    except ImportError as error:
        raise UsageError(
            "tokenize-on-dask needs prefect-dask, which isn't installed. Install the extra: "
            "pip install 'dflash-pipeline[scale]'."
        ) from error
    local = {"n_workers": config.num_slices, "threads_per_worker": 1, "dashboard_address": None}
    place: dict[str, Any] = {"address": config.scheduler} if config.scheduler else {"cluster_kwargs": local}
    result: dict[str, Any] = _tokenize_on_dask.with_options(task_runner=DaskTaskRunner(**place))(config)
    return result


@flow(name="tokenize-on-dask", flow_run_name=named_after("tokenize", "run", "source"), **RESULT)
def _tokenize_on_dask(config: SpreadRun) -> dict[str, Any]:
    log_to_run()
    with TokenizeSession(config.run, s3_credentials(), workspace()) as session:
        plans = list_completions(session)
        done = session.finished(plans)
    missing = [plan for plan in plans if plan.fingerprint not in done]
    futures = [make_shard_anywhere.submit(ShardRun(run=config.run, shard=plan.name)) for plan in missing]
    for future in futures:
        future.result()
    return tokenize_completions(config.run)
