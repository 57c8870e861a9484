from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasks.training import LogForwarder, every


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
