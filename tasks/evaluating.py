"""Task of the flow `evaluate-drafter`: one call into the library; torch is imported where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task

from dflash.eval.config import EvaluateRun
from tasks.policies import COMPUTE_TASK
from tasks.settings import s3_credentials, settings

if TYPE_CHECKING:
    from dflash.eval.job import EvaluationResult


@task(name="evaluate-checkpoint", **COMPUTE_TASK)
def evaluate_checkpoint(run: EvaluateRun) -> EvaluationResult:
    """Decode the prompts and write `evaluation.json` beside the checkpoint."""
    from dflash.eval.job import evaluate_run

    return evaluate_run(run, s3_credentials(), settings().cache)
