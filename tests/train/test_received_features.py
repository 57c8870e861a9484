"""A drafter rank's end of the queue when memory runs out in the middle of it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash.data.batches import BatchState, Pack
from dflash.data.row_reader import Row
from dflash.errors import TrainingError
from dflash.train import split_drafter
from dflash.train.feature_source import pack_digest
from dflash.train.peers import Message, Peers
from dflash.train.seats import Seat
from dflash.train.split_drafter import ReceivedFeatures
from dflash.train.topology import TopologyConfig
from dflash.train.world import World

FEATURES, HIDDEN, TOKENS = 6, 3, 5
ROW = Row((0, 0), np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, dtype=np.bool_), "sample", "made")
PACK = Pack((ROW,), 0, 0, BatchState())


class OneTargetRank:
    """Says all that a target rank says for one pack; each tensor is filled with its number."""

    others = (1,)

    def __init__(self) -> None:
        ends = {"size": [9, HIDDEN], "dtype": "float32", "tied": True}
        ready = {"index": 0, "num_tokens": TOKENS, "digest": pack_digest(PACK)}
        self.messages = [Message(1, "ends", ends), Message(1, "ready", ready), Message(1, "bye", {"failed": None})]
        self.received = 0
        self.failed: list[BaseException | None] = []

    def get(self, waiting_for: str) -> Message:
        assert self.messages, f"waits for ever for {waiting_for}"
        return self.messages.pop(0)

    def receive_tensor(self, rank: int, tensor: Tensor) -> None:
        assert rank in self.others
        tensor.fill_(self.received)
        self.received += 1

    def send(self, rank: int, kind: str, **fields: Any) -> None:
        pass

    def say_bye(self, failed: BaseException | None = None) -> None:
        self.failed.append(failed)

    def close(self) -> None:
        pass


class Full:
    """Stands in for torch where a device is full: room of one width is refused for a number of times."""

    def __init__(self, width: int, times: float) -> None:
        self.width = width
        self.left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: tuple[int, ...], **options: Any) -> Tensor:
        if tuple(size) == (TOKENS, self.width) and self.left > 0:
            self.left -= 1
            raise torch.OutOfMemoryError("simulated")
        return torch.empty(size, **options)


@pytest.fixture
def rank() -> OneTargetRank:
    return OneTargetRank()


@pytest.fixture
def features(rank: OneTargetRank) -> ReceivedFeatures:
    topology = TopologyConfig(mode="split", target_ranks=1, drafter_ranks=1)
    seat = Seat(topology, World(), None, cast("Peers", rank))
    found = ReceivedFeatures(seat, torch.device("cpu"), FEATURES, final=True)
    found.prepare([PACK])
    return found


@pytest.mark.parametrize("width", [FEATURES, HIDDEN], ids=["features", "final states"])
def test_a_step_that_begins_anew_after_running_out_of_memory_receives_its_pack(
    rank: OneTargetRank, features: ReceivedFeatures, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(split_drafter, "torch", Full(width, 1))
    with pytest.raises(torch.OutOfMemoryError):
        features.states(PACK)
    found = features.states(PACK)
    assert rank.received == 4  # two ends, the features, the final states: none was dropped, none came twice
    assert found.final_SH is not None
    assert [set(values.flatten().tolist()) for values in (found.features_SF, found.final_SH)] == [{2}, {3}]


def test_without_room_for_what_still_comes_the_first_error_stays(
    rank: OneTargetRank, features: ReceivedFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_drafter, "torch", Full(FEATURES, float("inf")))
    error = TrainingError("out of memory")
    features.close(error)
    assert rank.failed == [error]
