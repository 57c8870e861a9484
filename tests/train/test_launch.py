from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash.errors import IncompatibleError, TrainingError
from dflash.train.curves import MetricsTail
from dflash.train.launch import Trainer
from dflash.train.leash import Leash, should_stop
from dflash.train.run import TrainRun
from dflash.train.stopping import stop_on_signal
from tests.train.tiny_run import publish_rows, tiny_run, write_target

LONG = {"num_epochs": 100_000, "checkpoint_every": 100_000}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def make_run(tmp_path: Path, target: Path, num_processes: int = 1, **train: Any) -> TrainRun:
    publish_rows(str(tmp_path / "data"), tmp_path / "made")
    values = tiny_run(str(tmp_path / "data"), target, str(tmp_path / "run"), **train)
    return TrainRun.model_validate(values | {"num_processes": num_processes})


def trainer_of(run: TrainRun, tmp_path: Path) -> Trainer:
    return Trainer(run, tmp_path / "work", None, dict(os.environ) | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_two_ranks_stop_together_when_asked_and_go_on(tmp_path: Path, target: Path) -> None:
    run = make_run(tmp_path, target, 2, **LONG)
    tail, listening = MetricsTail(tmp_path / "run"), set[str]()
    with trainer_of(run, tmp_path) as trainer:

        def stop_at_a_step() -> None:
            if tail.newest() is not None:
                assert trainer._process is not None
                starter = psutil.Process(trainer._process.pid)
                sockets = [one for rank in starter.children() for one in rank.net_connections("inet")]
                listening.update(one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN)
                trainer.ask_to_stop()

        stopped = trainer.wait(stop_at_a_step)
    assert listening == {"127.0.0.1"}
    assert (stopped["status"], stopped["step"] > 0) == ("stopped", True)
    assert not list((tmp_path / "work" / "jobs").iterdir())
    ends = run.train.model_copy(update={"max_steps": stopped["step"] + 2})
    with trainer_of(run.model_copy(update={"train": ends}), tmp_path) as trainer:
        assert trainer.wait()["step"] == stopped["step"] + 2


def test_the_trainers_own_error_reaches_its_starter(tmp_path: Path, target: Path) -> None:
    run = make_run(tmp_path, target)
    small = run.model_copy(update={"target": str(write_target(tmp_path / "other", vocab_size=40))})
    with pytest.raises(IncompatibleError, match="embedding of 40 rows"), trainer_of(small, tmp_path) as trainer:
        trainer.wait()


def test_a_trainer_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path, target: Path) -> None:
    trainer = trainer_of(make_run(tmp_path, target), tmp_path)
    trainer._environment["PYTHONHASHSEED"] = "none"  # ends the interpreter before it runs anything
    with pytest.raises(TrainingError, match=r"ended with code 1 and no result(.|\n)*PYTHONHASHSEED"), trainer:
        trainer.wait()
    assert trainer.log.exists()


PROGRAM = """
import os, sys, time
from pathlib import Path
from dflash.train.launch import Trainer
from dflash.train.run import TrainRun
from dflash.train.stopping import stop_on_signal

run = TrainRun.model_validate_json(Path(sys.argv[1]).read_bytes())
with Trainer(run, Path(sys.argv[2]), None, os.environ) as trainer:
    trainer.wait()
"""


def test_a_trainer_whose_starter_was_killed_saves_and_ends(tmp_path: Path, target: Path) -> None:
    run = make_run(tmp_path, target, **LONG)
    (tmp_path / "run.json").write_text(run.model_dump_json())
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "run.json"), str(tmp_path / "work")]
    starter = subprocess.Popen(program, cwd=Path(__file__).resolve().parents[2])
    tail = MetricsTail(tmp_path / "run")
    deadline = time.monotonic() + 240
    while tail.newest() is None:
        assert time.monotonic() < deadline
        assert starter.poll() is None
        time.sleep(0.1)
    starter.kill()
    starter.wait()
    while not (tmp_path / "run" / "result.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json"))) == 1


def test_a_second_interrupt_does_not_wait() -> None:
    with stop_on_signal(signal.SIGTERM, signal.SIGINT) as asked:
        for number in (signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_leash_holds_as_long_as_its_holder(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    assert not should_stop(job)
    with Leash(job) as leash:
        assert not should_stop(job)
        leash.ask_to_stop()
        assert should_stop(job)
    with Leash(job):
        assert not should_stop(job)
    assert should_stop(job)
