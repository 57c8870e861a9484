"""The table artifact of a run: each shard with state, rows, tokens, seconds, attempts and link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefect.artifacts import create_table_artifact
from prefect.settings import PREFECT_UI_URL

from dflash.data.plan import ShardPlan
from dflash.errors import ShardFailedError
from dflash.manifest import ShardReceipt

State = Literal["made", "reused", "failed"]


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """What became of one shard in this run.

    Attributes:
        attempts: attempts of the flow run up to this one, each of which tried the shard; 0 for one that was there.
            A retry of the flow run makes new task runs, so their own counts stay at 1.
    """

    plan: ShardPlan
    state: State
    receipt: ShardReceipt | None = None
    seconds: float = 0.0
    attempts: int = 0
    task_run_id: str = ""
    error: str = ""

    def row(self) -> dict[str, Any]:
        """Row of the table."""
        entry = None if self.receipt is None else self.receipt.shard
        link = f"[task run]({PREFECT_UI_URL.value()}/runs/task-run/{self.task_run_id})" if self.task_run_id else ""
        return {
            "shard": self.plan.name,
            "state": self.state,
            "files": f"{self.plan.files[0].info.key} +{len(self.plan.files) - 1}",
            "rows": None if entry is None else entry.num_rows,
            "tokens": None if entry is None else entry.num_tokens,
            "loss tokens": None if entry is None else entry.num_loss_tokens,
            "rejected": None if self.receipt is None else sum(self.receipt.reject_reasons.values()),
            "seconds": self.seconds,
            "attempts": self.attempts,
            "link": link,
            "error": self.error,
        }


def publish_table(outcomes: Iterable[ShardOutcome], key: str) -> None:
    """Write the table artifact of a run."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.plan.number)
    counts = {state: sum(outcome.state == state for outcome in ordered) for state in ("made", "reused", "failed")}
    description = f"{len(ordered)} shards: {counts['made']} made, {counts['reused']} reused, {counts['failed']} failed."
    if counts["failed"]:
        description += " " + how_to_rerun(outcome.plan.name for outcome in ordered if outcome.state == "failed")
    create_table_artifact([outcome.row() for outcome in ordered], key=key, description=description)


def how_to_rerun(names: Iterable[str]) -> str:
    """What a person does about failed shards."""
    return (
        f"Failed: {', '.join(names)}. Fix the cause, then press Retry on the flow run: only these are made again. "
        "Or run the deployment `tokenize-shard` with one shard's name, then this flow."
    )


def raise_for_failures(outcomes: Mapping[int, ShardOutcome]) -> None:
    """Raise an error that names each failed shard.

    Raises:
        ShardFailedError: at least one shard failed; the others are kept.
    """
    failed = [outcome for _, outcome in sorted(outcomes.items()) if outcome.state == "failed"]
    if failed:
        lines = "\n".join(f"  {outcome.plan.name}: {outcome.error}" for outcome in failed)
        raise ShardFailedError(
            f"{len(failed)} of {len(outcomes)} shards failed; the others are kept, nothing was published.\n"
            f"{lines}\n{how_to_rerun(outcome.plan.name for outcome in failed)}"
        )
