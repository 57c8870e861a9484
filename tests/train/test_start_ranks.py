"""Starting ranks without torch in them: what they are told, who listens, and how they end together."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash.train import start_ranks
from dflash.train.start_ranks import run_ranks

STARTER = """
import os, sys
from dflash.train.start_ranks import run_ranks
sys.exit(run_ranks([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]], 3, os.environ))
"""
TELL = """
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
told = {name: os.environ[name] for name in names}
if told["RANK"] == "0":
    told["listening"] = socket.socket(fileno=int(sys.argv[2])).getsockname()
open(f"{sys.argv[1]}/{told['RANK']}.json", "w").write(json.dumps(told))
"""
WAIT = """
import os, signal, sys, time
from pathlib import Path
def end(*_):
    Path(sys.argv[1], f"ended-{os.environ['RANK']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1], f"ready-{os.environ['RANK']}").touch()
while True:
    time.sleep(0.01)
"""
FAIL = WAIT.replace(
    "while True:",
    """
while os.environ["RANK"] == "1":
    if len(list(Path(sys.argv[1]).glob("ready-*"))) == 3:
        sys.exit(7)
    time.sleep(0.01)
while True:""",
)
DEAF = FAIL.replace("signal.signal(signal.SIGTERM, end)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def starter(folder: Path, program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", STARTER, program, str(folder)])


def test_each_rank_hears_its_number_and_a_socket_that_other_machines_can_not_reach(tmp_path: Path) -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert run_ranks([sys.executable, "-S", "-c", TELL, str(tmp_path)], 2, environment) == 0
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told] == [("0", "0", "2"), ("1", "1", "2")]
    assert told[0]["listening"] == ["127.0.0.1", int(told[0]["MASTER_PORT"])]
    assert (told[0]["MASTER_ADDR"], told[0]["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert told[0]["NCCL_SOCKET_IFNAME"] == "ib0"  # somebody chose it


def test_a_rank_that_fails_ends_the_others_and_its_code_is_the_runs(tmp_path: Path) -> None:
    process = starter(tmp_path, FAIL)
    assert process.wait(30) == 7
    assert {path.name for path in tmp_path.glob("ended-*")} == {"ended-0", "ended-2"}


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_ranks, "END_S", 0.2)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    started = time.monotonic()
    assert run_ranks([sys.executable, "-S", "-c", DEAF, str(tmp_path)], 3, {}) == 7
    assert time.monotonic() - started < 20
    assert not list(tmp_path.glob("ended-*"))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_signal_is_handed_on_and_all_are_waited_for(tmp_path: Path) -> None:
    process = starter(tmp_path, WAIT)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready-*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks = psutil.Process(process.pid).children()
    process.terminate()
    assert process.wait(30) == 0
    assert len(list(tmp_path.glob("ended-*"))) == 3
    assert not any(rank.is_running() for rank in ranks)
