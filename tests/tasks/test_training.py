from __future__ import annotations

import logging
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed, Running, Scheduled, State

from tasks.training import LogForwarder, choose_key, every

KEYS = ["run-train-1", "run-train-2", "run-train-3"]


def child(attempt: int, state: State[object]) -> FlowRun:
    return FlowRun(flow_id=uuid4(), idempotency_key=KEYS[attempt - 1], state=state)


@pytest.mark.parametrize(
    ("runs", "attempt"),
    [
        ([], 3),
        ([child(1, Running())], 1),
        ([child(1, Completed())], 1),
        ([child(2, Scheduled()), child(1, Crashed())], 2),
        ([child(1, Failed()), child(2, Cancelled())], 3),
        ([child(2, Running()), child(1, AwaitingRetry())], 1),
    ],
)
def test_a_child_that_runs_or_has_completed_is_taken_over(runs: list[FlowRun], attempt: int) -> None:
    assert choose_key(KEYS, runs) == KEYS[attempt - 1]


def test_the_trainers_own_whole_lines_are_repeated_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(b"INFO dflash.train.job taking checkpoint 4\nLoading weights 10 %\r\nWARNING dflash.x cut ")
    forward = LogForwarder(log)
    with caplog.at_level(logging.INFO, "tasks.training"):
        forward()
        forward()
        with log.open("ab") as file:
            file.write(b"there \xff\nINFO urllib3 noise\n")
        forward()
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [("INFO", "taking checkpoint 4"), ("WARNING", "cut there \ufffd")]


def test_every_waits_between_calls() -> None:
    calls: list[int] = []
    often, seldom = every(0, lambda: calls.append(1)), every(1000, lambda: calls.append(2))
    for _ in range(3):
        often()
        seldom()
    assert calls == [1, 2, 1, 1]
