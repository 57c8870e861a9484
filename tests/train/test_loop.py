from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.data.batches import LocalShards
from dflash.errors import TrainingError, UsageError
from dflash.model.drafter import Drafter
from dflash.train import loop
from dflash.train.checkpoint import load
from dflash.train.config import LossConfig, ReplayConfig
from dflash.train.curves import plot_metrics, read_metrics
from dflash.train.engine import StepReport, StepSums
from dflash.train.hooks import Hooks, TrainResult
from dflash.train.loop import Run
from dflash.train.metrics import MetricsWriter
from dflash.train.resume import check_resumable
from dflash.train.stopping import stop_on_signal
from tests.train.conftest import config

MakeDrafter = Callable[[], Drafter]


class StopAfter:
    def __init__(self, asks: int) -> None:
        self.left = asks

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return dict(load(result.checkpoint).weights)


def assert_same(first: TrainResult, second: TrainResult) -> None:
    one, two = load(first.checkpoint), load(second.checkpoint)
    assert all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)
    states = [snapshot.optimizer["optimizer"]["state"] for snapshot in (one, two)]
    for name, state in states[0].items():
        assert all(torch.equal(state[key], states[1][name][key]) for key in state)
    assert one.record["progress"]["batch"] == two.record["progress"]["batch"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"accumulation": 2},
        {"replay": ReplayConfig(max_bytes=4000, steps=2, dtype="bfloat16", in_background=True)},
        {"loss_vocab_size": 16, "loss": LossConfig(weighting="d_pace"), "warm_start": True},
    ],
    ids=["plain", "accumulation", "replay", "d_pace"],
)
def test_k_steps_and_the_rest_equal_all_steps_bit_for_bit(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards, fields: dict[str, Any]
) -> None:
    whole = Run(config(**fields), target, make_drafter(), source, tmp_path / "whole").train()
    stops = 0
    for asks in (2, 1, 3):
        hooks = Hooks(should_stop=StopAfter(asks))
        part = Run(config(**fields), target, make_drafter(), source, tmp_path / "parts", hooks).train()
        stops += part.status == "stopped"
    rest = Run(config(**fields), target, make_drafter(), source, tmp_path / "parts").train()
    assert stops == 3
    assert whole.status == rest.status == "finished"
    assert whole.step == rest.step > 4
    assert_same(whole, rest)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_features_in_the_background_change_nothing(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    results = []
    for in_background in (False, True):
        replay = ReplayConfig(max_bytes=4000, steps=2, in_background=in_background)
        drafter = make_drafter()
        Run(config(replay=replay, num_epochs=2), target, drafter, source, tmp_path / str(in_background)).train()
        results.append(drafter.state_dict())
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name]), name
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("target")]


def test_a_finished_run_does_nothing_when_started_again(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    first = Run(config(), target, make_drafter(), source, tmp_path).train()
    again = Run(config(), target, make_drafter(), source, tmp_path).train()
    assert (again.status, again.step, again.checkpoint) == ("finished", first.step, first.checkpoint)


def test_sigterm_saves_and_leaves_the_run_resumable(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    def send(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal() as asked:
        stopped = Run(config(), target, make_drafter(), source, tmp_path, Hooks(asked, on_step=send)).train()
    assert signal.getsignal(signal.SIGTERM) is before
    assert (stopped.status, stopped.step) == ("stopped", 3)
    assert Run(config(), target, make_drafter(), source, tmp_path).train().status == "finished"


def test_rows_with_bad_features_are_left_out_and_counted(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    target.poison = {5}
    result = Run(config(num_epochs=1), target, make_drafter(), source, tmp_path / "few").train()
    assert 0 < result.skipped_rows < 12
    assert all(torch.isfinite(value).all() for value in weights(result).values())
    with pytest.raises(TrainingError, match=r"the limit is 2.*is kept"):
        Run(config(max_skipped_rows=2, checkpoint_every=1), target, make_drafter(), source, tmp_path / "stop").train()
    kept = loop.CheckpointFolder(tmp_path / "stop" / loop.CHECKPOINTS).latest()
    assert kept is not None
    assert all(torch.isfinite(value).all() for value in load(kept).weights.values())


def test_a_loss_that_is_no_number_is_null_in_the_metrics(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    run = Run(config(), target, make_drafter(), source, tmp_path)
    sums = StepSums(3, torch.device("cpu"))
    sums.add(numerator=float("nan"), weight=2.0)
    seen: list[dict[str, Any]] = []
    run._hooks = Hooks(on_step=seen.append)
    metrics = MetricsWriter(tmp_path, 0)
    run._report(StepReport(sums, None, 0.1), metrics, "fresh")
    metrics.close()
    assert seen[0]["loss"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_replay_computes_each_kept_row_once(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    fields = {"replay": ReplayConfig(max_bytes=1 << 20, steps=1, dtype="float32"), "num_epochs": 4}
    run = Run(config(**fields), target, make_drafter(), source, tmp_path)
    result = run.train()
    assert target.calls == 12
    assert run.engine.features.num_rows == 12
    assert run.engine.features.num_bytes == sum(source.num_tokens) * 32 * 4
    replayed = [row["replayed"] for row in read_metrics(tmp_path)]
    assert (replayed.count(True), replayed.count(False)) == (result.step // 2, result.step // 2 + 1)


def test_replay_stays_within_its_bytes(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    run = Run(config(replay=ReplayConfig(max_bytes=3000)), target, make_drafter(), source, tmp_path)
    run.train()
    assert 0 < run.engine.features.num_bytes <= 3000
    assert 0 < run.engine.features.num_rows < 12


def test_training_lowers_the_loss_and_draws_its_curves(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    seen: list[int] = []
    uploaded: list[Path] = []
    hooks = Hooks(upload=uploaded.append, on_step=lambda row: seen.append(row["step"]))
    fields = config(num_epochs=25, num_anchors=100, checkpoint_every=40, keep_checkpoints=2)
    result = Run(fields, target, make_drafter(), source, tmp_path, hooks).train()
    rows = read_metrics(tmp_path)
    assert seen == [row["step"] for row in rows] == list(range(1, result.step + 1))
    assert sum(row["loss"] for row in rows[-5:]) < 0.6 * sum(row["loss"] for row in rows[:5])
    assert rows[-1]["accuracy"] > 2 * rows[4]["accuracy"]
    assert len(loop.CheckpointFolder(tmp_path / loop.CHECKPOINTS).paths()) == 2
    assert len(uploaded) > 2
    assert uploaded[-1] == result.checkpoint
    assert list((tmp_path / "tensorboard").glob("events*"))
    plot_metrics(tmp_path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_kl_trains_towards_the_target(
    tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards
) -> None:
    fields = config(num_epochs=10, num_anchors=100, loss=LossConfig(objective="kl"))
    Run(fields, target, make_drafter(), source, tmp_path).train()
    rows = read_metrics(tmp_path)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


def test_ends_by_steps_or_seconds(tmp_path: Path, target: Any, make_drafter: MakeDrafter, source: LocalShards) -> None:
    by_steps = Run(config(max_steps=4), target, make_drafter(), source, tmp_path / "steps").train()
    assert by_steps.step == 4
    rates = [row["learning_rate"] for row in read_metrics(tmp_path / "steps")]
    assert rates[-1] < rates[-2] < rates[-3]
    by_time = Run(config(max_seconds=1e-9), target, make_drafter(), source, tmp_path / "seconds").train()
    assert (by_time.step, by_time.status) == (1, "finished")


def test_other_settings_or_another_environment_are_refused_on_resume(
    tmp_path: Path,
    target: Any,
    make_drafter: MakeDrafter,
    source: LocalShards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Run(config(max_steps=2), target, make_drafter(), source, tmp_path).train()
    with pytest.raises(UsageError, match="num_anchors: 6 -> 7"):
        Run(config(max_steps=2, num_anchors=7), target, make_drafter(), source, tmp_path)
    # What an out-of-memory error advises for a run that is to go on.
    smaller = {"loss": LossConfig(chunk_blocks=4), "recompute": True}
    assert Run(config(max_steps=2, **smaller), target, make_drafter(), source, tmp_path).progress.step == 2
    with pytest.raises(UsageError, match=r"loss: .*gamma"):
        Run(config(max_steps=2, loss=LossConfig(gamma=3)), target, make_drafter(), source, tmp_path)
    now = loop.fingerprint() | {"torch": "99.0"}
    monkeypatch.setattr(loop, "fingerprint", lambda: now)
    with pytest.raises(TrainingError, match=r"torch +\| [0-9.+cpu]+ +\| 99.0"):
        Run(config(max_steps=3), target, make_drafter(), source, tmp_path)
    accepted = Run(config(max_steps=3, accept_env_change=True), target, make_drafter(), source, tmp_path).train()
    assert accepted.step == 3


def test_how_it_is_computed_may_change_and_what_is_computed_may_not() -> None:
    began = config(replay=ReplayConfig(max_bytes=10)).model_dump(mode="json")
    record = {"environment": {}, "config": began}
    other = {"loss": LossConfig(chunk_blocks=1), "recompute": True, "attention": "dense"}
    check_resumable(record, config(replay=ReplayConfig(max_bytes=10, in_background=True), **other), None, {}, Path("r"))
    with pytest.raises(UsageError, match=r"replay: \{'max_bytes': 10.* -> \{'max_bytes': 20"):
        check_resumable(record, config(replay=ReplayConfig(max_bytes=20)), None, {}, Path("r"))
    with pytest.raises(UsageError, match=r"loss: None -> "):
        check_resumable(record | {"config": began | {"loss": None}}, config(), None, {}, Path("r"))
