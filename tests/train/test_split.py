"""Target ranks feed drafter ranks: the same losses as one rank, an exact resume, and a clear end when a side dies."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from dflash.data.batches import BatchState, Pack
from dflash.data.row_reader import Row
from dflash.errors import PeerLostError, TrainingError
from dflash.train import peers, split_drafter
from dflash.train.checkpoint import CheckpointFolder, Snapshot, load
from dflash.train.curves import MetricsTail, read_metrics
from dflash.train.feature_source import pack_digest
from dflash.train.job import Places, Watch, train_run
from dflash.train.launch import Trainer
from dflash.train.peers import Message
from dflash.train.run import TrainRun
from tests.train.rank_processes import Ranks
from tests.train.tiny_run import publish_rows, tiny_run, write_target

TWO_TO_ONE = {"mode": "split", "target_ranks": 2, "drafter_ranks": 1}
ONE_TO_TWO = {"mode": "split", "target_ranks": 1, "drafter_ranks": 2}
LONG = {"num_epochs": 100_000, "checkpoint_every": 100_000}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    publish_rows(str(folder / "data"), folder / "made")
    return str(folder / "data")


def in_one_rank(folder: Path, run: dict[str, Any]) -> Snapshot:
    train_run(TrainRun.model_validate(run), Places(folder / "work-alone"), Watch(), torch.device("cpu"))
    return newest(Path(run["output"]))


def newest(run_dir: Path) -> Snapshot:
    path = CheckpointFolder(run_dir / "checkpoints").latest()
    assert path is not None
    return load(path)


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir)]


def assert_equal(one: Snapshot, other: Snapshot) -> None:
    assert one.record["progress"]["batch"] == other.record["progress"]["batch"]
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


def test_two_target_ranks_and_one_drafter_rank_train_as_one_rank_does(
    tmp_path: Path, dataset: str, target: Path
) -> None:
    expected = in_one_rank(tmp_path, tiny_run(dataset, target, str(tmp_path / "one")))
    split = tiny_run(dataset, target, str(tmp_path / "split"))
    split["train"]["topology"] = TWO_TO_ONE
    ranks = Ranks(tmp_path / "first", split, 3, stop=True)
    assert ranks.wait() == [0, 0, 0], ranks.log()
    assert json.loads(ranks.result.read_text())["status"] == "stopped"
    ranks = Ranks(tmp_path / "second", split, 3)
    assert ranks.wait() == [0, 0, 0], ranks.log()
    assert_equal(expected, newest(tmp_path / "split"))
    assert losses(tmp_path / "split") == losses(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [{"ramp_up": "on"}, {"sharding": "fsdp"}, {"loss": {"objective": "kl"}}], ids=["ramped", "fsdp", "kl"]
)
def test_one_target_rank_feeds_two_drafter_ranks(
    tmp_path: Path, dataset: str, target: Path, changed: dict[str, Any]
) -> None:
    expected = in_one_rank(tmp_path, tiny_run(dataset, target, str(tmp_path / "one"), accumulation=2, **changed))
    split = tiny_run(dataset, target, str(tmp_path / "split"), topology=ONE_TO_TWO, **changed)
    ranks = Ranks(tmp_path / "ranks", split, 3)
    assert ranks.wait() == [0, 0, 0], ranks.log()
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    found = newest(tmp_path / "split")
    assert found.record["progress"]["batch"] == expected.record["progress"]["batch"]
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_target_that_is_spread_over_its_ranks_trains_the_same(tmp_path: Path, dataset: str, target: Path) -> None:
    expected = in_one_rank(tmp_path, tiny_run(dataset, target, str(tmp_path / "one")))
    spread = tiny_run(dataset, target, str(tmp_path / "split"), topology=TWO_TO_ONE | {"shard_target": True})
    spread["train"]["ramp_up"] = "on"
    ranks = Ranks(tmp_path / "ranks", spread, 3)
    assert ranks.wait() == [0, 0, 0], ranks.log()
    assert_equal(expected, newest(tmp_path / "split"))
    assert losses(tmp_path / "split") == losses(tmp_path / "one")


def wait_for_steps(run_dir: Path, ranks: Ranks) -> None:
    tail, deadline = MetricsTail(run_dir), time.monotonic() + 120
    while tail.newest() is None:
        assert time.monotonic() < deadline, ranks.log()
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 2], ids=["drafter", "target"])
def test_when_a_rank_is_killed_all_others_end_and_say_so(
    tmp_path: Path, dataset: str, target: Path, victim: int
) -> None:
    run = tiny_run(dataset, target, str(tmp_path / "split"), topology=TWO_TO_ONE, **LONG)
    ranks = Ranks(tmp_path / "ranks", run, 3)
    wait_for_steps(tmp_path / "split", ranks)
    ranks.signal(victim, signal.SIGKILL)
    codes = ranks.wait(60)
    # A target rank whose drafter rank says why it fails has nothing to add.
    assert codes[victim] == -signal.SIGKILL
    assert codes[:1] == [1] if victim else codes[1:] == [1, 1], ranks.log()
    result = json.loads(ranks.result.read_text())
    assert result["error"] == "PeerLostError"
    assert "goes on from the newest checkpoint" in result["message"]
    if victim == 2:  # the drafter rank lives, so the step it had finished isn't lost
        assert newest(tmp_path / "split").step > 0
        assert f"Rank {victim}" in ranks.log()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "changed"),
    [(1, {"topology": ONE_TO_TWO, "sharding": "fsdp"}), (2, {"topology": TWO_TO_ONE | {"shard_target": True}})],
    ids=["drafter", "target"],
)
def test_a_rank_that_dies_inside_a_pass_of_sharded_weights_is_named(
    tmp_path: Path, dataset: str, target: Path, victim: int, changed: dict[str, Any]
) -> None:
    ranks = Ranks(tmp_path / "ranks", tiny_run(dataset, target, str(tmp_path / "split"), **changed, **LONG), 3)
    wait_for_steps(tmp_path / "split", ranks)
    ranks.signal(victim, signal.SIGKILL)
    codes = ranks.wait(90)
    assert codes[victim] == -signal.SIGKILL
    assert codes[0] == 1
    assert json.loads(ranks.result.read_text())["error"] == "PeerLostError"
    assert [path.name for path in ranks.logs if "Traceback" in path.read_text()] == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2], ids=["drafter", "target"])
def test_a_rank_that_hangs_is_not_waited_for_forever(tmp_path: Path, dataset: str, target: Path, victim: int) -> None:
    topology = TWO_TO_ONE | {"peer_timeout_s": 15}
    ranks = Ranks(tmp_path / "ranks", tiny_run(dataset, target, str(tmp_path / "split"), topology=topology, **LONG), 3)
    wait_for_steps(tmp_path / "split", ranks)
    hung = ranks.processes[victim]
    ranks.signal(victim, signal.SIGSTOP)
    try:
        for process in ranks.processes:
            if process is not hung:
                process.join(90)
                assert process.exitcode is not None, ranks.log()
    finally:
        hung.kill()
    ranks.wait()
    assert json.loads(ranks.result.read_text())["error"] == "PeerLostError"
    if victim == 2:
        assert newest(tmp_path / "split").step > 0


@pytest.mark.parametrize("found", [{"digest": "0" * 64}, {"num_tokens": 8}], ids=["other rows", "shorter"])
def test_features_of_other_rows_are_refused(found: dict[str, Any]) -> None:
    row = Row((0, 0), np.arange(9, dtype=np.int32), np.ones(9, dtype=np.bool_), "sample-7", "made")
    pack = Pack((row,), 4, 0, BatchState())
    fields: dict[str, Any] = {"index": 4, "num_tokens": 9, "digest": pack_digest(pack)}
    split_drafter._check(Message(3, "ready", fields), pack)
    with pytest.raises(TrainingError, match=r"Rank 3 computed other rows for pack 4 .*'sample-7'"):
        split_drafter._check(Message(3, "ready", fields | found), pack)
    other = replace(pack, rows=(replace(row, sample_id="sample-8"),))
    assert pack_digest(other) != pack_digest(pack)


def test_what_a_goodbye_says_fits_a_message_whatever_it_is() -> None:
    for text in ("\U0001f600" * 5000, "\ud800\x00\n" * 5000, '"\\' * 5000, "x"):
        assert len(json.dumps({"kind": "bye", "failed": peers._short(text)}, ensure_ascii=False).encode()) <= 1024


@pytest.mark.slow
def test_a_launcher_is_told_which_rank_died_and_starts_the_run_again(
    tmp_path: Path, dataset: str, target: Path
) -> None:
    values = tiny_run(dataset, target, str(tmp_path / "split"), topology=TWO_TO_ONE, **LONG) | {"num_processes": 3}
    run = TrainRun.model_validate(values)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    tail, killed = MetricsTail(tmp_path / "split"), list[psutil.Process]()

    def kill_a_target_rank_at_a_step() -> None:
        assert trainer._process is not None
        if not killed and tail.newest() is not None:
            ranks = psutil.Process(trainer._process.pid).children()
            killed.extend(rank for rank in ranks if rank.environ().get("RANK") == "2")
            killed[0].kill()

    with (
        pytest.raises(PeerLostError, match="Rank 2 is gone"),
        Trainer(run, tmp_path / "work", None, environment) as trainer,
    ):
        trainer.wait(kill_a_target_rank_at_a_step)
    saved = newest(tmp_path / "split").step
    ends = run.train.model_copy(update={"max_steps": saved + 2})
    with Trainer(run.model_copy(update={"train": ends}), tmp_path / "work", None, environment) as trainer:
        assert trainer.wait()["step"] == saved + 2


@pytest.mark.slow
def test_an_error_of_the_target_reaches_the_drafter_rank(tmp_path: Path, dataset: str, target: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in target.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes()[: -500 if path.suffix == ".safetensors" else None])
    run = tiny_run(dataset, damaged, str(tmp_path / "split"), topology=TWO_TO_ONE)
    ranks = Ranks(tmp_path / "ranks", run, 3)
    assert ranks.wait(60) == [1, 1, 1], ranks.log()
    assert "can't be loaded" in json.loads(ranks.result.read_text())["message"]
    assert "Rank 1 ended while" in ranks.logs[0].read_text() or "Rank 2 ended while" in ranks.logs[0].read_text()
