"""Flow `refresh-dataset`: merge each batch of completions that no version of the dataset names yet.

Runs on a schedule, on the event `generation.batch.completed`, and by hand. What is merged is read from the manifests,
never from a record of its own, so that a run may be killed, repeated, or run beside another one. Batches are merged in
the order of their names; one that fails ends the run and holds back those behind it.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run as runtime

from dflash.config import RefreshRun
from dflash.data.discovery import FoundBatch, mergeable
from dflash.errors import DatasetError, DflashError, GateError, PublishConflictError
from flows.merge_dataset import merge_dataset
from flows.run_names import named_after
from flows.tokenize_completions import RESULT, tokenize_completions
from tasks.refreshing import look_for_batches, read_current_version, start_training
from tasks.settings import log_to_run

# On a retry of the parent Prefect takes the result of its n-th child from the first attempt, if it was kept. The n-th
# batch that is merged is another one then, so nothing is kept: each child runs.
_NOTHING_KEPT: dict[str, Any] = {"persist_result": False}


@flow(name="refresh-dataset", flow_run_name=named_after("refresh", "merge", "batch", "dataset"), **RESULT)
def refresh_dataset(config: RefreshRun) -> dict[str, Any]:
    """Merge every complete batch that no version of the dataset names, in order of name; then start a training.

    Nothing happens where there is nothing new. The first batch of an empty dataset becomes version 1.

    Args:
        config: the folder of batches, how each is merged, when one is complete, what to start afterwards.

    Returns:
        The batches that were merged with version and rows, those that wait, and the training's flow run.
    """
    log_to_run()
    log = get_run_logger()
    merged: dict[str, dict[str, Any]] = {}
    batches = look_for_batches(config)
    while todo := [batch for batch in mergeable(batches) if batch.name not in merged]:
        batch = todo[0]
        log.info("merging %s (%d files, %s), the first of %d", batch.name, batch.num_files, batch.why, len(todo))
        try:
            merged[batch.name] = _merge(config, batch.name)
        except DflashError as error:
            _publish_table(batches, merged, failed=batch.name)
            raise _named(error, todo) from error
        batches = look_for_batches(config)  # others may have come, or another run may have merged some
    for batch in batches:
        if batch.state in {"changed", "open", "empty"}:
            log.warning("%s is %s: %s", batch.name, batch.state, batch.why)
    _publish_table(batches, merged)
    return {
        "dataset": config.merge.batch.dataset,
        "merged": merged,
        "waiting": [batch.name for batch in batches if batch.state in {"open", "ready"} and batch.name not in merged],
        "changed": [batch.name for batch in batches if batch.state == "changed"],
        "training": _train(config, has_news=bool(merged)),
    }


def _merge(config: RefreshRun, name: str) -> dict[str, Any]:
    """Merge one batch, or make it version 1; return what a table needs to know."""
    run = config.merge_of(name)
    if read_current_version(config) is None:
        try:
            return _pick(tokenize_completions.with_options(**_NOTHING_KEPT)(run.batch))
        except (DatasetError, PublishConflictError):
            if read_current_version(config) is None:
                raise
            get_run_logger().warning("another run published version 1 meanwhile: merging into it")
    return _pick(merge_dataset.with_options(**_NOTHING_KEPT)(run))


def _pick(result: dict[str, Any]) -> dict[str, Any]:
    names = ("version", "manifest", "rows")
    return {name: result[name] for name in names} | {"already_merged": result.get("already_merged", False)}


def _named(error: DflashError, todo: list[FoundBatch]) -> DflashError:
    """The error of a batch with the batch's name in it, of the class that decides the exit code."""
    kind = type(error) if isinstance(error, GateError | PublishConflictError) else DatasetError
    behind = ", ".join(batch.name for batch in todo[1:]) or "none"
    return kind(
        f"Batch {todo[0].name} was not merged; those before it are. Held back behind it: {behind}.\n{error}\n"
        "Mend the batch and run this again, or leave it out with `skip`."
    )


def _train(config: RefreshRun, *, has_news: bool) -> str | None:
    """Start the training of a new version; a retry of a run may find its news published by the attempt before."""
    if config.train is None or not (has_news or runtime.run_count > 1):
        return None
    version = read_current_version(config)
    return None if version is None else start_training(config.train, version)


def _publish_table(batches: list[FoundBatch], merged: dict[str, dict[str, Any]], failed: str = "") -> None:
    """Write the table artifact: each batch folder, its state, and what this run did with it."""
    rows = []
    for batch in batches:
        done = merged.get(batch.name)
        action = "failed" if batch.name == failed else "" if done is None else f"merged into {done['manifest']}"
        rows.append(batch.to_json() | {"this run": action, "rows now": None if done is None else done["rows"]})
    create_table_artifact(
        rows,
        key="refresh-batches",
        description=f"{len(batches)} batches, {len(merged)} merged by this run"
        + (f", {failed} failed." * bool(failed)),
    )
