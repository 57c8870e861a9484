from __future__ import annotations

from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed, Running, Scheduled, State

from tasks.children import choose_key

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
