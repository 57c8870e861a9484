"""Flow `merge-dataset`: tokenize a new batch, judge it, and publish it together with the current version.

Nothing of the current version is moved: the new manifest names its shards again. A merge that loses a race against
another publisher is planned anew on the version that won.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact

from dflash.config import MergeRun
from dflash.data.backup import BackupRecord
from dflash.data.compatibility import Recipe
from dflash.data.merge import MergedShards, merge_manifest, put_rejects
from dflash.data.merge_plan import MergePlan, MergeRules, NewBatch
from dflash.data.quality_report import QualityReport
from dflash.data.screening import make_screen
from dflash.data.shard_files import ShardFiles
from dflash.data.tokenize_run import TokenizeSession
from dflash.data.workspace import shards_with_rows
from dflash.errors import PublishConflictError
from dflash.manifest import Manifest, ShardReceipt, batch_fingerprint, batch_from_receipts
from flows.progress import ProgressBoard
from flows.run_names import config_value, last_part
from flows.tokenize_completions import RESULT, RUNNER, judge, make_shards, upload_all
from tasks.merging import back_up_version, check_batch, plan_dataset_merge, publish_merged_version, write_merged_shards
from tasks.settings import log_to_run, s3_credentials, workspace
from tasks.tokenization import list_completions

PLAN_ATTEMPTS = 3  # races in a row that a merge may lose before it gives up


def run_name() -> str:
    """Name of a flow run: what it merges into what."""
    source, dataset = (last_part(config_value("batch", name)) for name in ("source", "dataset"))
    return f"merge-{source}-into-{dataset}"


@flow(name="merge-dataset", flow_run_name=run_name, task_runner=RUNNER, **RESULT)
def merge_dataset(config: MergeRun) -> dict[str, Any]:
    """Tokenize a new batch and publish it behind the current version of a dataset, which is backed up first.

    Run it again after a failure or a kill: shards that are done are reused, a batch that is merged stays merged once.

    Args:
        config: the batch and its dataset, the policy for duplicates, the draw, where backups go.

    Returns:
        Counts, version, bytes and the report's URI.
    """
    log_to_run()
    board = ProgressBoard(key="merge-progress")
    with TokenizeSession(config.batch, s3_credentials(), workspace()) as session:
        plans = list_completions(session)
        merged = check_batch(session, batch_fingerprint(plan.fingerprint for plan in plans))
        if merged is not None:
            get_run_logger().info("%s holds this batch already", merged.name)
            return _already_merged(config, merged)
        receipts = make_shards(session, plans, board)
        board.set(step="judging")
        report, report_uri = judge(session, receipts)
        job = _MergeJob(config, session, tuple(receipts), report)
        outcome = job.run(board)
        board.set(step="done")
        board.show(force=True)
        result = outcome.summary(config, session) | {"report": report_uri, "seconds": round(board.progress.seconds, 2)}
    create_markdown_artifact(render_merge(result), key="merge-report")
    return result


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a merge did; `shards` is None where another run had merged the batch meanwhile."""

    manifest: Manifest
    plan: MergePlan
    shards: MergedShards | None
    backup: BackupRecord | None

    def summary(self, config: MergeRun, session: TokenizeSession) -> dict[str, Any]:
        """Counts and bytes for `--json`, the report and the flow's result."""
        if self.shards is None:
            return _already_merged(config, self.manifest)
        counts, before, batch = self.manifest.counts, self.plan.current, self.plan.new.shards
        stores = [store.counters.snapshot() for store in (session.root.store, session.root.meta)]
        return {
            "dataset": config.batch.dataset,
            "version": self.manifest.version,
            "manifest": self.manifest.name,
            "parent": self.manifest.parent,
            "already_merged": False,
            "rows_before": 0 if before is None else before.counts.num_rows,
            "rows_of_batch": sum(entry.num_rows for entry in batch),
            "rows_dropped": self.plan.dropped_rows,
            "rows": counts.num_rows,
            "tokens_before": 0 if before is None else before.counts.num_tokens,
            "tokens_of_batch": sum(entry.num_tokens for entry in batch),
            "tokens_dropped": self.plan.dropped_tokens,
            "tokens": counts.num_tokens,
            "loss_tokens": counts.num_loss_tokens,
            "shards": counts.num_shards,
            "shards_rewritten": self.shards.num_rewritten,
            "choice": self.plan.notes,
            "rejected": self.manifest.batches[-1].reject_reasons,
            "gate_override_reason": self.manifest.gate_override_reason,
            "old_shard_bytes_read": self.shards.old_bytes_read,
            "old_shard_bytes_sent": self.shards.old_bytes_sent,
            "bytes_uploaded": sum(store.bytes_up for store in stores),
            "bytes_downloaded": sum(store.bytes_down for store in stores),
            "backup": None if self.backup is None else self.backup.to_json(),
        }


@dataclass(frozen=True, slots=True)
class _MergeJob:
    """A judged batch on its way into the dataset."""

    config: MergeRun
    session: TokenizeSession
    receipts: tuple[ShardReceipt, ...]
    report: QualityReport

    def run(self, board: ProgressBoard) -> _Outcome:
        """Plan, upload, back up, publish; again on the version that won a race.

        Raises:
            PublishConflictError: other publishers won every time.
        """
        for attempt in range(1, PLAN_ATTEMPTS + 1):
            try:
                outcome = self._attempt(board)
                break
            except PublishConflictError as error:
                if attempt == PLAN_ATTEMPTS:
                    raise
                get_run_logger().warning("%s\nPlanning again on that version.", error)
        for receipt in self.receipts:
            shutil.rmtree(self.session.spool / receipt.shard.fingerprint, ignore_errors=True)
        return outcome

    def _attempt(self, board: ProgressBoard) -> _Outcome:
        session, files = self.session, self.session.files()
        board.set(step="comparing")
        plan = plan_dataset_merge(session, self._new_batch(), self._rules(files), files)
        if plan.already_merged:
            assert plan.current is not None, "only a version can hold a batch"
            return _Outcome(plan.current, plan, None, None)
        board.set(step="uploading")
        whole = plan.as_they_are()
        spooled = [receipt for receipt in self.receipts if session.is_spooled(receipt)]
        upload_all(session, [receipt for receipt in spooled if receipt.shard.fingerprint in whole])
        put_rejects(session.root, spooled, self.session.spool)
        shards = write_merged_shards(session, plan, files, session.scratch / "rewritten")
        manifest = merge_manifest(plan, shards)
        board.set(step="backing up")
        backup = None if plan.current is None else back_up_version(session, plan.current, self.config.backup)
        board.set(step="publishing")
        return _Outcome(publish_merged_version(session, plan, manifest), plan, shards, backup)

    def _new_batch(self) -> NewBatch:
        return NewBatch(
            Recipe(self.session.tokenizer_record(), self.session.run.options),
            batch_from_receipts(self.session.run.source, self.receipts),
            shards_with_rows(self.receipts),
            self.report.model_dump(mode="json"),
            None if self.report.passed else self.session.run.gate.override_reason,
        )

    def _rules(self, files: ShardFiles) -> MergeRules:
        screen = make_screen(self.config.screen, files, self.session.tokenizer, s3_credentials())
        return MergeRules(self.config.duplicates, self.config.mix, screen)


def _already_merged(config: MergeRun, current: Manifest) -> dict[str, Any]:
    return {
        "dataset": config.batch.dataset,
        "version": current.version,
        "manifest": current.name,
        "already_merged": True,
        "rows": current.counts.num_rows,
        "tokens": current.counts.num_tokens,
    }


def render_merge(result: dict[str, Any]) -> str:
    """The report of a merge as Markdown."""
    if result["already_merged"]:
        return f"`{result['manifest']}` holds this batch already: nothing to do."
    lines = [f"# {result['dataset']}: version {result['version']}", "", "| | rows | tokens |", "|---|---:|---:|"]
    for title, name in (("before", "_before"), ("batch", "_of_batch"), ("dropped", "_dropped"), ("**now**", "")):
        lines.append(f"| {title} | {result['rows' + name]:,} | {result['tokens' + name]:,} |")
    backup = result["backup"]
    lines += [
        "",
        f"Duplicates: {result['choice']['duplicates']} (policy `{result['choice']['policy']}`).",
        (
            f"Bytes of old shards read: {result['old_shard_bytes_read']:,}, sent: {result['old_shard_bytes_sent']:,}. "
            f"Uploaded in all: {result['bytes_uploaded']:,}."
        ),
        f"Backup: {backup['target']}, {backup['bytes_copied']:,} bytes copied." if backup else "No version before.",
    ]
    return "\n".join(lines)
