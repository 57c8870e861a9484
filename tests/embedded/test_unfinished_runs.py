"""What `dflash down` tells the server of runs that it ended, on a stand-in that answers in pages as the server does."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from embedded import stack
from embedded.stack_state import StackState

PAGE = 200


class Pages:
    """Flow runs that are not done; one of them stays so whatever it is told."""

    def __init__(self, count: int) -> None:
        self.unfinished = [str(number) for number in range(count)]
        self.told: Counter[str] = Counter()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/flow_runs/filter":
            return [{"id": run} for run in self.unfinished[:PAGE]]
        run = path.split("/")[2]
        assert body["state"]["type"] == "CRASHED"
        self.told[run] += 1
        if run != "0":
            self.unfinished.remove(run)
        return None


def test_each_run_is_told_once_however_many_there_are() -> None:
    pages = Pages(450)
    stack._crash_unfinished_runs(cast("StackState", SimpleNamespace(api=pages)))
    assert pages.told == Counter({str(number): 1 for number in range(450)})
    assert pages.unfinished == ["0"]
