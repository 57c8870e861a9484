"""Flow `evaluate-drafter`: held-out, free-running tau of a checkpoint, as an artifact and beside the checkpoint."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from dflash.eval.config import EvaluateRun
from dflash.eval.table import markdown
from flows.run_names import named_after
from tasks.evaluating import evaluate_checkpoint
from tasks.settings import log_to_run


@flow(
    name="evaluate-drafter",
    flow_run_name=named_after("evaluate", "checkpoint"),
    persist_result=True,
    result_serializer="json",
)
def evaluate_drafter(config: EvaluateRun) -> dict[str, Any]:
    """Decode held-out prompts with a drafter and its target, and count what is accepted.

    Args:
        config: checkpoint, target, prompts, limits; with `min_tau` it is a gate.

    Returns:
        tau, its definition, and where `evaluation.json` lies.

    Raises:
        GateError: tau is below `min_tau`; the evaluation is written all the same.
    """
    log_to_run()
    result = evaluate_checkpoint(config)
    create_markdown_artifact(markdown(result.record), key="evaluation")
    result.enforce()
    return result.summary()
