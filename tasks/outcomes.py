"""What child runs left on the store; the results that Prefect keeps lie on the machines that they ran on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prefect import task

from dflash.errors import ObjectNotFoundError, TrainingError
from dflash.eval.config import EXPORT_CONFIG, EvaluateRun, ExportRun
from dflash.eval.record import EVALUATION, read_evaluation
from dflash.storage import Store, open_store
from dflash.train.newest import newest_checkpoint
from dflash.train.run import RESULT, TrainRun
from tasks.policies import STORE_TASK
from tasks.settings import s3_credentials

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A held-out measurement.

    Attributes:
        uri: of `evaluation.json`.
        weights_sha256: of the drafter that was measured.
        tau: overall.
    """

    uri: str
    weights_sha256: str
    tau: float


@task(name="read-training", **STORE_TASK)
def read_training(run: TrainRun) -> dict[str, Any]:
    """What the trainer wrote at the end: its newest checkpoint, steps, data.

    Raises:
        TrainingError: nothing can be read there, or it was trained on another version than asked.
    """
    store = open_store(run.output, s3_credentials())
    try:
        found: dict[str, Any] = json.loads(store.read(RESULT, max_bytes=_MAX_BYTES))
        trained_on = found["data"]["manifest"]
    except ObjectNotFoundError as error:
        raise _not_there(store, RESULT) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainingError(f"{store.uri}/{RESULT} is damaged: {error!r}. Retry the run that trains there.") from error
    if trained_on != run.version:
        raise TrainingError(
            f"{store.uri}/{RESULT} tells of a training on {trained_on}, expected {run.version}: another run has "
            "trained there since. Retry this one."
        )
    return found


@task(name="read-evaluation", **STORE_TASK)
def read_measured(run: EvaluateRun) -> Evaluated:
    """The evaluation beside the checkpoint that was named, or beside the newest one of the run that was.

    Raises:
        TrainingError: there is none, or it was made with other parameters than asked.
    """
    store = open_store(run.checkpoint, s3_credentials())
    newest = newest_checkpoint(store.uri, {info.key for info in store.list()})
    if newest is not None:
        store = open_store(newest, s3_credentials())
    record = read_evaluation(store)
    if record is None:
        raise _not_there(store, EVALUATION)
    if record.options != run:
        raise TrainingError(
            f"{store.uri}/{EVALUATION} was made with other parameters than this run asked for: another run has "
            "measured there since. Retry this one."
        )
    return Evaluated(f"{store.uri}/{EVALUATION}", record.drafter.weights_sha256, record.tau)


@task(name="read-export", **STORE_TASK)
def read_export(run: ExportRun) -> str:
    """Where an export lies whole.

    Raises:
        TrainingError: it isn't there.
    """
    store = open_store(run.output, s3_credentials())
    try:
        store.head(EXPORT_CONFIG)
    except ObjectNotFoundError as error:
        raise _not_there(store, EXPORT_CONFIG) from error
    return store.uri


def _not_there(store: Store, name: str) -> TrainingError:
    return TrainingError(
        f"The child run completed, but {store.uri}/{name} can't be seen from here. A local folder must be one that "
        "both machines share; else use s3:// for `output`."
    )
