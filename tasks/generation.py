"""Tasks of the flow `generate-completions`: each one call on the run's session, small results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from dflash.generate.config import RegenerateRun
from dflash.generate.outcome import Outcome
from dflash.generate.regenerate import Search, find_prompts
from dflash.generate.report import assess_batch, render_markdown, save_report
from dflash.generate.session import GenerateSession
from tasks.policies import COMPUTE_TASK, STORE_TASK
from tasks.settings import s3_credentials


@task(name="plan-generation", **STORE_TASK)
def plan_generation(session: GenerateSession) -> int:
    """Read prompts and batch; return how many prompts have no record yet."""
    return session.plan()


@task(name="find-regenerable", **STORE_TASK)
def find_regenerable(run: RegenerateRun, cache: Path) -> Search:
    """Look through a batch or a dataset for records to ask for again."""
    return find_prompts(run, s3_credentials(), cache)


# Requests are retried inside; the batch's own objects say what is done, so a retry goes on where it was.
@task(name="generate-records", **STORE_TASK)
def generate_records(session: GenerateSession) -> Outcome:
    """Make the records that are missing."""
    return session.generate()


@task(name="spot-check", **STORE_TASK)
def spot_check(session: GenerateSession, outcome: Outcome) -> tuple[dict[str, Any], str]:
    """Look at samples of the batch; keep the report in it. Return it as JSON and as Markdown."""
    # A rerun of a complete batch had no failures of its own: `_SUCCESS` knows those of the run that made it.
    report = assess_batch(session.log.store, session.log.counts, None if session.log.is_complete() else outcome)
    save_report(session.log.store, report)
    return report.to_json(), render_markdown(report)


@task(name="publish-batch", **COMPUTE_TASK)
def publish_batch(session: GenerateSession, outcome: Outcome, report: dict[str, Any]) -> Outcome:
    """Write `_SUCCESS` where the batch is complete."""
    return session.finish(outcome, {name: value for name, value in report.items() if name != "samples"})
