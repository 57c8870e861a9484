"""Flow `generate-completions`: the target answers prompts; the batch's folder is complete when `_SUCCESS` is there.

Then the event `generation.batch.completed` tells the refresh of datasets. A run that failed or was killed goes on where
it was: what is done is read from the batch, never from Prefect.
"""

from __future__ import annotations

import threading
import time
from pathlib import PurePosixPath
from typing import Any, cast
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.events import emit_event
from prefect.task_runners import ThreadPoolTaskRunner

from dflash.generate.config import GenerateRun, RegenerateRun
from dflash.generate.outcome import Outcome
from dflash.generate.progress import GenerateProgress
from dflash.generate.session import GenerateSession
from flows.progress import ARTIFACT_INTERVAL_S, listener
from flows.run_names import named_after
from flows.tokenize_completions import RESULT
from tasks.generation import find_regenerable, generate_records, plan_generation, publish_batch, spot_check
from tasks.settings import api_key, log_to_run, s3_credentials, settings

RUNNER: Any = ThreadPoolTaskRunner(max_workers=4)  # its own generic type fits no flow decorator
EVENT = "generation.batch.completed"
STOP_S = 30.0  # what a cancelled run has to bring its records to the store


@flow(name="generate-completions", flow_run_name=named_after("generate", "batch"), task_runner=RUNNER, **RESULT)
def generate_completions(config: GenerateRun) -> dict[str, Any]:
    """Let the target answer prompts, each exactly once, into a folder of completions.

    Run it again after a failure or a kill: prompts with a record aren't asked again.

    Args:
        config: prompts, batch folder, endpoints, sampling, limits.

    Returns:
        Counts, failures, and whether the batch is complete.
    """
    log_to_run()
    board = GenerationBoard()
    session = GenerateSession(config, api_key(), settings().work, s3_credentials_for(config), board.listen)
    with session:
        left = plan_generation(session)
        get_run_logger().info("%d prompts have no record yet", left)
        outcome = _generate(session, board)
        report, markdown = spot_check(session, outcome)
        create_markdown_artifact(markdown, key="generation-report")
        board.show(force=True)
        outcome = publish_batch(session, outcome, report)
    emit_completed(config, outcome)
    return summary(config, outcome)


@flow(name="regenerate-completions", flow_run_name="regenerate-{config.source}", task_runner=RUNNER, **RESULT)
def regenerate_completions(config: RegenerateRun) -> dict[str, Any]:
    """Ask again for what a batch or a dataset version lacks: empty, tiny, cut and rejected records, into a new batch.

    Args:
        config: what is looked through, for what, and how it is generated.

    Returns:
        What was found, and the generation's own result.
    """
    log_to_run()
    found = find_regenerable(config, settings().cache)
    get_run_logger().info("%s: %s", config.source, found.to_json())
    if found.prompts is None:
        return found.to_json() | {"batch": config.generate.batch, "complete": False, "records": 0}
    run = config.generate.model_copy(update={"prompts": found.prompts})
    return found.to_json() | generate_completions.with_options(persist_result=False)(run)


def _generate(session: GenerateSession, board: GenerationBoard) -> Outcome:
    """Run the task in a thread, so that this one can show the progress and hear of a cancellation."""
    future = generate_records.submit(session)
    try:
        while not future.state.is_final():
            future.wait(timeout=0.3)
            board.show()
    except BaseException:
        session.stop.set()
        future.wait(timeout=STOP_S)
        raise
    return future.result()


def emit_completed(config: GenerateRun, outcome: Outcome) -> None:
    """Tell whoever waits for batches; the flow that hears it looks for itself, so that twice is as good as once."""
    name = PurePosixPath(config.batch.rstrip("/")).name
    emit_event(
        EVENT,
        resource={"prefect.resource.id": f"generation.batch.{name}"},
        payload={"batch": config.batch, "records": outcome.num_records, "failed": outcome.num_failed},
    )


def summary(config: GenerateRun, outcome: Outcome) -> dict[str, Any]:
    """What `--json` and the flow's result say."""
    per_s = round(outcome.num_new / outcome.seconds, 2) if outcome.seconds else 0.0
    return {
        "batch": config.batch,
        "complete": outcome.is_complete,
        "prompts": outcome.num_prompts,
        "records": outcome.num_records,
        "new": outcome.num_new,
        "failed": outcome.num_failed,
        "failed_share": outcome.failed_share,
        "failures": outcome.failures,
        "failed_tries": outcome.kinds,
        "output_tokens": outcome.output_tokens,
        "seconds": outcome.seconds,
        "records_per_s": per_s,
    }


def s3_credentials_for(config: GenerateRun) -> Any:
    """Credentials of the object store, where one is used."""
    return s3_credentials() if "s3://" in f"{config.batch} {config.prompts}" else None


class GenerationBoard:
    """Shows a run's progress: in the shell at once, in the artifact now and then."""

    def __init__(self) -> None:
        self._progress = GenerateProgress()
        self._lock = threading.Lock()
        self._listener: Any = listener.get()
        self._shown_at = time.monotonic()
        artifact = create_progress_artifact(0.0, key="generation-progress", description="planning")
        self._artifact_id = cast("UUID", artifact)

    def listen(self, progress: GenerateProgress) -> None:
        """Take a new state; called from any thread."""
        with self._lock:
            self._progress = progress
        if self._listener is not None:
            self._listener(progress)

    def show(self, *, force: bool = False) -> None:
        """Update the artifact if the last update is long enough ago; call from the flow's own thread."""
        if not force and time.monotonic() - self._shown_at < ARTIFACT_INTERVAL_S:
            return
        self._shown_at = time.monotonic()
        with self._lock:
            progress = self._progress
        update_progress_artifact(self._artifact_id, progress.percent, description=progress.describe())
