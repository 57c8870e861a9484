"""A flow for the tests of the database: many short tasks, so many at a time."""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

RUNNER: Any = ThreadPoolTaskRunner(max_workers=32)


@task(name="one")
def one(number: int) -> int:
    return number


@flow(name="many", task_runner=RUNNER)
def many(count: int) -> None:
    numbers = [future.result() for future in one.map(range(count))]
    assert numbers == list(range(count))
