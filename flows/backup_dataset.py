"""Flows `backup-dataset`, `restore-dataset`, `rollback-dataset` and `collect-garbage`: each one call of the library."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run as runtime
from pydantic import Field

from dflash.data.backup import backup_version, open_mirror, rollback
from dflash.data.collect import CollectRules, collect_garbage, plan_collection
from dflash.data.copying import Progress
from dflash.data.dataset import DatasetRoot
from dflash.data.restore import restore_version
from flows.run_names import last_part
from tasks.settings import log_to_run, s3_credentials, settings

RESULT: dict[str, Any] = {"persist_result": True, "result_serializer": "json"}
LOG_INTERVAL_S = 10.0
Dataset = Annotated[str, Field(min_length=1, description="Dataset root: s3://bucket/prefix or a local folder.")]
Backup = Annotated[str | None, Field(description="Where the backup lies; <dataset>.backups by default.")]
Check = Annotated[bool, Field(description="Read what is there already through and compare digests.")]


def run_name() -> str:
    """Name of a flow run: what it does to what."""
    return f"{runtime.flow_name}-{last_part(runtime.parameters['dataset'])}"


@flow(name="backup-dataset", flow_run_name=run_name, **RESULT)
def backup_dataset(
    dataset: Dataset, backup: Backup = None, version: str | None = None, check: Check = False
) -> dict[str, Any]:
    """Copy a version (the current one by default) into the backup."""
    root, mirror = _open(dataset, backup)
    record = backup_version(root, root.manifest(version), mirror, _log_progress("backed up"), check=check)
    return _publish("backup", record.to_json())


@flow(name="restore-dataset", flow_run_name=run_name, **RESULT)
def restore_dataset(
    dataset: Dataset, backup: Backup = None, to: str | None = None, check: Check = False
) -> dict[str, Any]:
    """Make a lost or damaged dataset whole from its backup, and a version (the current one by default) current."""
    root, mirror = _open(dataset, backup)
    return _publish("restore", restore_version(mirror, root, to, _log_progress("restored"), check=check).to_json())


@flow(name="rollback-dataset", flow_run_name=run_name, **RESULT)
def rollback_dataset(dataset: Dataset, to: str, backup: Backup = None) -> dict[str, Any]:
    """Make an earlier version current again."""
    root, mirror = _open(dataset, backup)
    manifest = rollback(root, to, mirror, _log_progress("fetched"))
    return _publish("rollback", {"dataset": dataset, "manifest": manifest.name, **manifest.counts.model_dump()})


@flow(name="collect-garbage", flow_run_name=run_name, **RESULT)
def collect_dataset_garbage(
    dataset: Dataset,
    backup: Backup = None,
    keep: Annotated[int, Field(ge=1, description="Versions whose shards stay in place.")] = 1,
    min_age_hours: Annotated[float, Field(ge=0, description="What is younger stays.")] = 24.0,
    dry_run: Annotated[bool, Field(description="Only say what would go and why.")] = True,
) -> dict[str, Any]:
    """Move shards of replaced versions to the backup, and remove what no version and no backup names."""
    root, mirror = _open(dataset, backup)
    rules = CollectRules(keep, min_age_hours)
    if dry_run:
        return _publish("garbage", plan_collection(root, mirror, rules).to_json())
    return _publish("garbage", collect_garbage(root, mirror, rules, _log_progress("moved")).to_json())


def _open(dataset: str, backup: str | None) -> tuple[DatasetRoot, DatasetRoot]:
    log_to_run()
    root = DatasetRoot.open(dataset, s3_credentials(), settings().cache)
    return root, open_mirror(root, backup, s3_credentials())


def _log_progress(what: str) -> Progress:
    """Lines in the run's log, not more than one in ten seconds: a full copy takes minutes."""
    logger, last_s = get_run_logger(), time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal last_s
        if done == total or time.monotonic() - last_s >= LOG_INTERVAL_S:
            last_s = time.monotonic()
            logger.info("%d of %d shards %s", done, total, what)

    return log


def _publish(key: str, result: dict[str, Any]) -> dict[str, Any]:
    create_markdown_artifact(f"```json\n{json.dumps(result, indent=1)}\n```", key=f"dataset-{key}")
    return result
