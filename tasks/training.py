"""Tasks of the training flows: the version of a run, and the trainer process."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import INPUTS, RUN_ID

from dflash.data.dataset import DatasetRoot
from dflash.train.launch import Trainer
from dflash.train.run import TrainRun
from tasks.policies import STORE_TASK
from tasks.settings import s3_credentials, settings

log = logging.getLogger(__name__)
_OUR_LINE = re.compile(r"(INFO|WARNING|ERROR) dflash\S* ")

# The one thing that Prefect keeps for a run: a retry must train on the version that the first attempt resolved.
_ONCE_A_FLOW_RUN: dict[str, Any] = STORE_TASK | {
    "cache_policy": INPUTS + RUN_ID,
    "persist_result": True,
    "result_serializer": "json",
}


@task(name="resolve-version", **_ONCE_A_FLOW_RUN)
def resolve_version(dataset: str, version: str | None) -> str:
    """Name of the version to train on; a retry of the flow run gets the same one, whatever was merged meanwhile."""
    return DatasetRoot.open(dataset, s3_credentials(), settings().cache).manifest(version).name


@task(name="check-training", **STORE_TASK)
def check_training(run: TrainRun) -> dict[str, Any]:
    """Check data, target and drafter against each other, without weights and without torch."""
    from dflash.train.preflight import prepare

    ready = prepare(run, DatasetRoot.open(run.dataset, s3_credentials(), settings().cache))
    counts = ready.manifest.counts
    return {"manifest": ready.manifest.name, "rows": counts.num_rows, "tokens": counts.num_tokens}


def start_trainer(run: TrainRun) -> Trainer:
    """A trainer of this machine, with this process's credentials and none of Prefect's variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return Trainer(run, settings().work, s3_credentials(), environment)


@dataclass(slots=True)
class LogForwarder:
    """Repeats the trainer's own lines in the flow run's log."""

    path: Path
    _offset: int = field(default=0, init=False)

    def __call__(self) -> None:
        """Forward what was written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if match := _OUR_LINE.match(line):
                log.log(logging.getLevelNamesMapping()[match[1]], "%s", line[match.end() :])


def every(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Call an action at most once in so many seconds."""
    last = -seconds

    def maybe() -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            action()

    return maybe
