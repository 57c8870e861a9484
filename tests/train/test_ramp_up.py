"""The heaviest packs go first, their result is dropped, and what memory came to is on record."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.data.batches import BatchState, LocalShards, Pack
from dflash.data.row_reader import Row
from dflash.errors import TrainingError
from dflash.model.drafter import Drafter
from dflash.train.anchors import eligible
from dflash.train.checkpoint import load
from dflash.train.config import OptimizerConfig, ReplayConfig, TrainConfig
from dflash.train.curves import describe_step, read_metrics
from dflash.train.hooks import Hooks
from dflash.train.loop import Run
from dflash.train.memory_watch import MemoryWatch
from dflash.train.packed import PackedRow
from dflash.train.ramp_up import heaviest_packs, wants_ramp_up

CPU = torch.device("cpu")
CONFIG = TrainConfig(
    pack_tokens=30, num_anchors=6, num_epochs=2, optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.1)
)


def row(length: int) -> Row:
    import numpy as np

    return Row((0, length), np.arange(length, dtype=np.int32), np.zeros(length, dtype=np.bool_), "one", "made")


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), budget=st.integers(2, 200))
def test_the_heaviest_packs_are_full_and_have_as_many_anchors_as_there_can_be(lengths: list[int], budget: int) -> None:
    some = [Pack((row(length),), 5, 0, BatchState()) for length in lengths]
    long, mixed = heaviest_packs(some, TrainConfig(pack_tokens=budget))
    for pack in (long, mixed):
        packed = PackedRow.of(pack.rows)
        assert pack.num_tokens == len(packed.ids_S) == budget
        assert int(eligible(packed.loss_mask_S, packed.document_S).sum()) == budget - len(pack.rows)
        assert all(0 < len(one.input_ids) <= max(2, *lengths) for one in pack.rows)
    assert len(long.rows[0].input_ids) == min(budget, max(2, *lengths))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_ramp_up_changes_nothing_that_comes_after_it(
    tmp_path: Path, target: Any, make_drafter: Callable[[], Drafter], source: LocalShards, accumulation: int
) -> None:
    plain = CONFIG.model_copy(update={"accumulation": accumulation})
    ramped = plain.model_copy(update={"ramp_up": "on"})
    whole = Run(plain, target, make_drafter(), source, tmp_path / "whole").train()
    stop_at_once = Hooks(should_stop=lambda: True)
    stopped = Run(ramped, target, make_drafter(), source, tmp_path / "ramped", stop_at_once).train()
    assert stopped.step == 1
    calls = target.calls
    resumed = Run(ramped, target, make_drafter(), source, tmp_path / "ramped").train()
    packs = [load(result.checkpoint).record["progress"]["batch"]["num_packs"] for result in (stopped, whole)]
    assert target.calls - calls == 2 + packs[1] - packs[0]
    expected, found = load(whole.checkpoint), load(resumed.checkpoint)
    assert all(torch.equal(value, found.weights[name]) for name, value in expected.weights.items())
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("whole", "ramped")]
    assert losses[0] == losses[1]


def test_a_run_that_does_not_fit_says_so_before_its_first_step(
    tmp_path: Path, target: Any, make_drafter: Callable[[], Drafter], source: LocalShards
) -> None:
    target.out_of_memory_above = 10
    config = CONFIG.model_copy(update={"ramp_up": "on"})
    with pytest.raises(TrainingError, match="halved already"):
        Run(config, target, make_drafter(), source, tmp_path / "run").train()
    assert read_metrics(tmp_path / "run") == []
    target.out_of_memory_above = 29  # only a pack that is full to the last token is too much
    run = Run(config, target, make_drafter(), source, tmp_path / "run")
    run.train()
    assert all(line["halved"] for line in read_metrics(tmp_path / "run"))


def test_it_is_for_gpus_unless_asked_for() -> None:
    cuda = torch.device("cuda", 0)
    on, off = (TrainConfig(ramp_up=choice) for choice in ("on", "off"))
    assert [wants_ramp_up(TrainConfig(), device) for device in (CPU, cuda)] == [False, True]
    assert [wants_ramp_up(config, CPU) for config in (on, off)] == [True, False]
    assert not wants_ramp_up(off, cuda)
    assert not wants_ramp_up(TrainConfig(replay=ReplayConfig(max_bytes=10)), cuda)
    with pytest.raises(ValueError, match="made-up rows"):
        TrainConfig(replay=ReplayConfig(max_bytes=10), ramp_up="on")


def test_metrics_hold_the_measured_peak_beside_the_planned_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        MemoryWatch(CPU, planned_bytes=1 << 50).report("after the ramp-up")
        MemoryWatch(CPU, planned_bytes=1000).report("at the end")
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "were planned" in caplog.text
    watch = MemoryWatch(CPU, planned_bytes=2_000_000_000)
    assert json.loads(json.dumps(watch.to_json()))["allocator"]["settings"] is not None
    assert watch.numbers()["peak_bytes"] > 50_000_000
    line = {"epoch": 0, "loss": 1.0, "accuracy": 0.5, "seconds": 3.0, "peak_bytes": 1_500_000_000}
    assert describe_step(line | {"planned_bytes": 2_000_000_000}).endswith("memory 1.5 of 2.0 GB planned")
