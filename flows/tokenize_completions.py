"""Flow `tokenize-completions`: from a folder of completions to a gated version 1; and `tokenize-shard` for one shard.

Downloads run as tasks of their own; a shard's tokenize task starts when its files are there, so the stages overlap.
At most a few shards are in flight, which bounds disk, memory and open task runs whatever the size of the source.
"""

from __future__ import annotations

import collections
import functools
import threading
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run as runtime
from prefect.task_runners import ThreadPoolTaskRunner

from dflash.config import ShardRun, TokenizeRun
from dflash.data.plan import ShardPlan
from dflash.data.quality import enforce
from dflash.data.quality_report import QualityReport
from dflash.data.report import render_markdown
from dflash.data.tokenize_run import TokenizeSession
from dflash.data.workspace import group_files
from dflash.errors import GateError, UsageError
from dflash.manifest import Manifest, ShardReceipt
from flows.progress import ProgressBoard
from flows.run_names import named_after
from flows.shard_table import ShardOutcome, publish_table, raise_for_failures
from tasks.settings import log_to_run, s3_credentials, workspace
from tasks.tokenization import (
    assess_quality,
    download_files,
    list_completions,
    publish_first_version,
    tokenize_shard,
    upload_shard,
)

# Threads only wait: for the store, or for a process of the pool. Task runs in flight are bounded below.
RESULT: dict[str, Any] = {"persist_result": True, "result_serializer": "json"}
RUNNER: Any = ThreadPoolTaskRunner(max_workers=512)  # its own generic type fits no flow decorator
SHARDS_AHEAD = 2  # shards whose files are fetched while every process has a shard in work


@flow(name="tokenize-completions", flow_run_name=named_after("tokenize", "source"), task_runner=RUNNER, **RESULT)
def tokenize_completions(config: TokenizeRun) -> dict[str, Any]:
    """Tokenize a batch of completions, judge it, and publish it as version 1 of a dataset.

    Run it again after a failure or a kill: shards that are done are reused.

    Args:
        config: source, dataset, tokenizer, options, limits of the quality gate.

    Returns:
        Counts, version and the report's URI.
    """
    log_to_run()
    board = ProgressBoard(key="tokenize-progress")
    with TokenizeSession(config, s3_credentials(), workspace()) as session:
        plans = list_completions(session)
        session.require_free_root(plans)
        receipts = make_shards(session, plans, board)
        board.set(step="judging")
        report, report_uri = judge(session, receipts)
        board.set(step="uploading")
        sent = upload_all(session, receipts)
        board.set(step="publishing")
        manifest = publish_first_version(session, receipts, report)
        board.set(step="done")
        board.show(force=True)
        received = session.source.counters.snapshot().bytes_down
    return summary(manifest, config, board.progress.seconds) | {
        "report": report_uri,
        "bytes_uploaded": sent,
        "bytes_downloaded": received,
    }


@flow(name="tokenize-shard", flow_run_name="tokenize-{config.shard}", task_runner=RUNNER, **RESULT)
def tokenize_shard_flow(config: ShardRun) -> dict[str, Any]:
    """Tokenize one shard of a run again and put it in place; the run then finds it done.

    Args:
        config: the run's parameters and the shard's name from the run's table.

    Returns:
        The shard's name and counts.
    """
    log_to_run()
    with TokenizeSession(config.run, s3_credentials(), workspace()) as session:
        plans = list_completions(session)
        if config.shard_number >= len(plans):
            raise UsageError(
                f"{config.run.source} has no {config.shard}: expected shard-00000 to {plans[-1].name}, "
                "as in the table of the run."
            )
        plan = plans[config.shard_number]
        downloads: Any = [
            download_files.submit(session, group, f"{plan.name}-{number}")
            for number, group in enumerate(group_files(plan.files, config.run.files_per_download))
        ]
        made = tokenize_shard.submit(session, plan, downloads).result()
        upload_shard(session, made.receipt, plan.name)
        entry = made.receipt.shard
    return {"shard": plan.name, "rows": entry.num_rows, "tokens": entry.num_tokens, "seconds": made.seconds}


def make_shards(session: TokenizeSession, plans: list[ShardPlan], board: ProgressBoard) -> list[ShardReceipt]:
    """Make the shards that aren't there yet; return the receipts of all, in plan order.

    Raises:
        ShardFailedError: names each shard that failed; the others are kept.
    """
    finished = session.finished(plans)
    board.set(
        step="tokenizing",
        total_files=sum(len(plan.files) for plan in plans),
        total_bytes=sum(plan.num_bytes for plan in plans),
        total_shards=len(plans),
    )
    outcomes: dict[int, ShardOutcome] = {}
    for plan in plans:
        if plan.fingerprint in finished:
            outcomes[plan.number] = ShardOutcome(plan, "reused", finished[plan.fingerprint])
            _count(board, outcomes[plan.number])
    get_run_logger().info("%d shards, %d of them done already", len(plans), len(outcomes))
    missing = [plan for plan in plans if plan.number not in outcomes]
    for outcome in _ShardWindow(session, board).run(missing):
        outcomes[outcome.plan.number] = outcome
        board.show()
    publish_table(outcomes.values(), key="tokenize-shards")
    raise_for_failures(outcomes)
    return [receipt for _, outcome in sorted(outcomes.items()) if (receipt := outcome.receipt) is not None]


class _ShardWindow:
    """Submits downloads and tokenize tasks for a bounded number of shards at a time, in order."""

    def __init__(self, session: TokenizeSession, board: ProgressBoard) -> None:
        self._session = session
        self._board = board
        self._slots = threading.BoundedSemaphore(session.run.download_concurrency)
        self._width = session.pool.num_workers + SHARDS_AHEAD

    def run(self, plans: list[ShardPlan]) -> Any:
        """Yield the outcome of each shard, in plan order."""
        active: collections.deque[tuple[ShardPlan, PrefectFuture[Any], list[PrefectFuture[Any]]]] = collections.deque()
        for plan in plans:
            if len(active) == self._width:
                yield self._finish(*active.popleft())
            active.append((plan, *self._submit(plan)))
        while active:
            yield self._finish(*active.popleft())

    def _submit(self, plan: ShardPlan) -> tuple[PrefectFuture[Any], list[PrefectFuture[Any]]]:
        downloads: Any = []  # futures, which Prefect resolves before the task runs
        for number, group in enumerate(group_files(plan.files, self._session.run.files_per_download)):
            self._slots.acquire()
            future = download_files.submit(self._session, group, f"{plan.name}-{number}")
            future.add_done_callback(functools.partial(self._downloaded, len(group)))
            downloads.append(future)
        return tokenize_shard.submit(self._session, plan, downloads), downloads

    def _downloaded(self, num_files: int, _: PrefectFuture[Any]) -> None:
        self._slots.release()
        self._board.add(num_files=num_files)

    def _finish(self, plan: ShardPlan, future: PrefectFuture[Any], downloads: list[PrefectFuture[Any]]) -> ShardOutcome:
        future.wait()
        task_run_id = str(future.task_run_id)
        if future.state.is_completed():
            made = future.result()
            outcome = ShardOutcome(plan, "made", made.receipt, made.seconds, runtime.run_count, task_run_id)
            _count(self._board, outcome)
            return outcome
        # A shard without its files never started: what says why is the download.
        failed = next((item for item in downloads if not item.state.is_completed()), future)
        return ShardOutcome(
            plan,
            "failed",
            attempts=runtime.run_count,
            task_run_id=str(failed.task_run_id),
            error=failed.state.message or "",
        )


def _count(board: ProgressBoard, outcome: ShardOutcome) -> None:
    assert outcome.receipt is not None, "only outcomes with a receipt are counted"
    entry = outcome.receipt.shard
    files = len(outcome.plan.files) if outcome.state == "reused" else 0
    board.add(
        num_shards=1,
        num_files=files,
        num_samples=entry.num_rows,
        num_tokens=entry.num_tokens,
        num_bytes=outcome.plan.num_bytes,
    )


def judge(session: TokenizeSession, receipts: list[ShardReceipt]) -> tuple[QualityReport, str]:
    """Assess the batch, show and keep the report, and stop the run if it isn't fit to train on.

    Raises:
        GateError: which rules failed and what to look at; nothing was published.
    """
    report = assess_quality(session, receipts)
    uri = session.save_report(report, "passed" if report.passed else "refused")
    create_markdown_artifact(render_markdown(report) + f"\n\nPage with plots: {uri}", key="quality-report")
    try:
        enforce(report, session.run.gate)
    except GateError as error:
        raise GateError(f"{error}\nReport: {uri}") from None
    return report, uri


def upload_all(session: TokenizeSession, receipts: list[ShardReceipt]) -> int:
    """Upload every shard that isn't on the store yet, in parallel; return the bytes that took."""
    before = session.bytes_uploaded()
    futures = [
        upload_shard.submit(session, receipt, f"shard-{number:05d}")
        for number, receipt in enumerate(receipts)
        if session.is_spooled(receipt)
    ]
    for future in futures:
        future.result()
    return session.bytes_uploaded() - before


def summary(manifest: Manifest, config: TokenizeRun, seconds: float) -> dict[str, Any]:
    """What `--json` and the flow's result say."""
    counts = manifest.counts
    return {
        "dataset": config.dataset,
        "version": manifest.version,
        "manifest": manifest.name,
        "rows": counts.num_rows,
        "tokens": counts.num_tokens,
        "loss_tokens": counts.num_loss_tokens,
        "shards": counts.num_shards,
        "rejected": manifest.batches[-1].reject_reasons,
        "gate_override_reason": manifest.gate_override_reason,
        "seconds": round(seconds, 2),
    }
