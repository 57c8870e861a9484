"""Tasks of the flow `refresh-dataset`: look for new batches, start a training."""

from __future__ import annotations

import time
from typing import cast

from prefect import task
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from dflash.config import RefreshRun
from dflash.data.dataset import DatasetRoot
from dflash.data.discovery import FoundBatch, find_batches
from dflash.errors import UsageError
from dflash.storage import open_store
from tasks.policies import COMPUTE_TASK, STORE_TASK
from tasks.settings import s3_credentials, settings


@task(name="find-batches", **STORE_TASK)
def look_for_batches(config: RefreshRun) -> list[FoundBatch]:
    """Look at every batch folder."""
    batch = config.merge.batch
    root = DatasetRoot.open(batch.dataset, s3_credentials(), settings().cache)
    return find_batches(open_store(batch.source, s3_credentials()), root, config, time.time())


@task(name="current-version", **STORE_TASK)
def read_current_version(config: RefreshRun) -> str | None:
    """Name of the current version, None for an empty root."""
    current = DatasetRoot.open(config.merge.batch.dataset, s3_credentials(), settings().cache).current()
    return None if current is None else current.name


@task(name="start-training", **COMPUTE_TASK)
def start_training(deployment: str, version: str) -> str:
    """Start a deployment once for a version of the dataset, without waiting for it; return the flow run's id.

    It gets its own parameters and none from here, since any deployment may be named: which version it trains on is what
    those say, by default the one that is current when it starts (this one, or a later one that has its own start).

    Raises:
        UsageError: there is no such deployment, or its own parameters can't start a run.
    """
    try:
        run = run_deployment(deployment, timeout=0, as_subflow=False, idempotency_key=f"refresh-{version}")
    except ObjectNotFound as error:
        raise UsageError(
            f"{version} is published, but its training was not started: no deployment {deployment}. Expected "
            "flow-name/deployment-name as `prefect deployment ls` shows it. Correct `train`, then retry this run."
        ) from error
    except PrefectHTTPStatusError as error:
        if not error.response.is_client_error:
            raise
        raise UsageError(
            f"{version} is published, but its training was not started: {deployment} has parameters that can't start a "
            f"run. Prefect says: {_detail(error)}. Set them (`parameters` in deployments/prefect.yaml, or the "
            "deployment's page in the UI), then retry this run."
        ) from error
    return str(cast("FlowRun", run).id)


def _detail(error: PrefectHTTPStatusError) -> str:
    """What the server says about a refusal."""
    try:
        return str(error.response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return error.response.text[:500]
