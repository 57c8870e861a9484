"""Tasks of the flow `merge-dataset`: each one call into the library on the run's session, small results."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from dflash.data.backup import BackupRecord, backup_version, open_mirror
from dflash.data.compatibility import Recipe, check_compatible
from dflash.data.merge import MergedShards, publish_merge, write_shards
from dflash.data.merge_plan import MergePlan, MergeRules, NewBatch, holds_batch, plan_merge
from dflash.data.shard_files import ShardFiles
from dflash.data.tokenize_run import TokenizeSession
from dflash.manifest import Manifest
from tasks.policies import COMPUTE_TASK, STORE_TASK
from tasks.settings import s3_credentials


@task(name="check-compatibility", **STORE_TASK)
def check_batch(session: TokenizeSession, fingerprint: str) -> Manifest | None:
    """Refuse a batch that doesn't fit the current version; return that version where it holds the batch already."""
    current = session.root.current()
    if current is None:
        return None
    check_compatible(current, Recipe(session.tokenizer_record(), session.run.options))
    return current if holds_batch(current, fingerprint) else None


@task(name="plan-merge", **STORE_TASK)
def plan_dataset_merge(session: TokenizeSession, new: NewBatch, rules: MergeRules, files: ShardFiles) -> MergePlan:
    """Find duplicates and draw rows."""
    return plan_merge(session.root, new, rules, files)


@task(name="write-merged-shards", **STORE_TASK)
def write_merged_shards(session: TokenizeSession, plan: MergePlan, files: ShardFiles, folder: Path) -> MergedShards:
    """Rewrite the shards that lose rows and put them in place."""
    return write_shards(session.root, plan, files, folder)


@task(name="back-up-version", **STORE_TASK)
def back_up_version(session: TokenizeSession, current: Manifest, target: str | None) -> BackupRecord:
    """Copy the current version into its mirror."""
    mirror = open_mirror(session.root, target, s3_credentials())
    return backup_version(session.root, current, mirror)


@task(name="publish-version", **COMPUTE_TASK)
def publish_merged_version(session: TokenizeSession, plan: MergePlan, manifest: Manifest) -> Manifest:
    """Swap the pointer."""
    publish_merge(session.root, plan, manifest)
    return manifest
