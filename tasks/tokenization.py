"""Tasks of the flow `tokenize-completions`: each one call on the run's session, small results."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prefect import task

from dflash.config import ShardRun, TokenizeRun
from dflash.data.plan import PlannedFile, ShardPlan
from dflash.data.quality_report import QualityReport
from dflash.data.spool import LocalInput
from dflash.data.tokenize_run import TokenizeSession
from dflash.manifest import Manifest, ShardReceipt
from tasks.policies import COMPUTE_TASK, STORE_TASK
from tasks.settings import s3_credentials, workspace


@dataclass(frozen=True, slots=True)
class MadeShard:
    """A shard that a task made: its receipt and the wall seconds that took."""

    receipt: ShardReceipt
    seconds: float


@task(name="list-completions", **STORE_TASK)
def list_completions(session: TokenizeSession) -> list[ShardPlan]:
    """List the source and decide the shards."""
    return session.plan()


@task(name="download-files", task_run_name="download-{name}", **STORE_TASK)
def download_files(
    session: TokenizeSession,
    files: Sequence[PlannedFile],
    name: str,  # noqa: ARG001 (in the name of the task run)
) -> list[LocalInput]:
    """Fetch one group of files of a shard."""
    return session.download(files)


@task(name="tokenize-shard", task_run_name="tokenize-{plan.name}", **COMPUTE_TASK)
def tokenize_shard(session: TokenizeSession, plan: ShardPlan, inputs: list[list[LocalInput]]) -> MadeShard:
    """Make one shard from its downloaded files."""
    start = time.perf_counter()
    receipt = session.tokenize(plan, [item for group in inputs for item in group])
    return MadeShard(receipt, round(time.perf_counter() - start, 2))


@task(name="assess-quality", **COMPUTE_TASK)
def assess_quality(session: TokenizeSession, receipts: Sequence[ShardReceipt]) -> QualityReport:
    """Judge the whole batch."""
    return session.assess(receipts)


@task(name="upload-shard", task_run_name="upload-{name}", **STORE_TASK)
def upload_shard(
    session: TokenizeSession,
    receipt: ShardReceipt,
    name: str,  # noqa: ARG001 (in the name of the task run)
) -> None:
    """Put one shard, its index, its rejects and its receipt in place."""
    session.upload(receipt)


@task(name="publish-version", **STORE_TASK)
def publish_first_version(
    session: TokenizeSession, receipts: Sequence[ShardReceipt], report: QualityReport
) -> Manifest:
    """Publish the batch as version 1."""
    return session.publish_first(receipts, report)


@task(name="make-shard", task_run_name="make-{config.shard}", **COMPUTE_TASK)
def make_shard_anywhere(config: ShardRun) -> int:
    """Make one shard and put it in place, in whatever process and on whatever machine this runs; returns its rows."""
    session, plans = _session_here(config.run.model_dump_json())
    plan = plans[config.shard_number]
    receipt = session.tokenize(plan, session.download(plan.files))
    session.upload(receipt)
    return receipt.shard.num_rows


@functools.lru_cache(maxsize=1)
def _session_here(run: str) -> tuple[TokenizeSession, list[ShardPlan]]:
    """The session of this process for a run (as JSON): one process makes many shards, and loads the tokenizer once."""
    session = TokenizeSession(TokenizeRun.model_validate_json(run), s3_credentials(), workspace())
    atexit.register(session.pool.close)
    return session, session.plan()
