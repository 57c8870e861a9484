from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch

from dflash.model.features import Target
from dflash.train import setup
from dflash.train.feature_source import TargetEnds
from dflash.train.world import World


class Threads:
    """Ranks that are threads."""

    size = 3

    def __init__(self, rank: int, meeting: threading.Barrier) -> None:
        self.rank = rank
        self._meeting = meeting

    def barrier(self) -> None:
        self._meeting.wait(20)


def test_the_ranks_hold_one_whole_target_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = TargetEnds(torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2))
    monkeypatch.setattr(setup, "ends_of", lambda _: ends)
    meeting, loading, order = threading.Barrier(Threads.size), threading.Semaphore(1), list[int]()

    def load(rank: int) -> Target:
        assert loading.acquire(blocking=False), "two at a time"
        time.sleep(0.05)
        order.append(rank)
        loading.release()
        return cast("Target", None)

    def run(rank: int) -> TargetEnds:
        world = cast("World", Threads(rank, meeting))
        return setup.load_ends(lambda: load(rank), world, torch.device("cpu"))

    with ThreadPoolExecutor(Threads.size) as ranks:
        found = list(ranks.map(run, range(Threads.size)))
    assert order == [0, 1, 2]
    assert all(one.head_VH.shape == (2, 2) for one in found)
