"""Child processes are told apart from later ones, die with their starter when asked to, and end when told to."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dflash.errors import ServiceError
from embedded import processes
from embedded.processes import (
    ProcessIdentity,
    find_free_ports,
    find_process,
    identify_process,
    is_port_free,
    start_process,
    stop_process,
    write_pid_file,
)

REPOSITORY = Path(__file__).resolve().parents[2]
STARTER = """
import sys, time
from pathlib import Path
from embedded.processes import start_process
folder = Path(sys.argv[1])
child = start_process(
    ["sleep", "60"], log=folder / "log", folder=folder, environment={"PATH": "/usr/bin:/bin"},
    attached=sys.argv[2] == "attached",
)
print(child.pid, flush=True)
time.sleep(60)
"""


def start(command: list[str], folder: Path, *, attached: bool = False) -> ProcessIdentity:
    environment = {"PATH": os.defpath}
    return start_process(command, log=folder / "log", folder=folder, environment=environment, attached=attached)


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if identify_process(pid) is None:
            return True
        time.sleep(0.02)
    return False


def test_a_process_is_found_by_its_pid_file_until_it_ends(tmp_path: Path) -> None:
    identity = start(["sleep", "60"], tmp_path)
    pid_file = tmp_path / "pid"
    write_pid_file(pid_file, identity)
    assert find_process(pid_file) == identity
    assert stat.S_IMODE(pid_file.stat().st_mode) == stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    stop_process(identity)
    assert find_process(pid_file) is None
    stop_process(identity)
    assert not psutil.pid_exists(identity.pid)


def test_a_process_that_ends_just_as_it_is_looked_at_leaves_no_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = start(["sleep", "60"], tmp_path)
    look, looks = processes._started, iter(range(100))

    def end_at_the_last_look(pid: int, *, as_zombie: bool = False) -> str | None:
        if next(looks) == 2:  # the first two are before it is asked to end
            os.kill(pid, signal.SIGKILL)
            while look(pid) is not None:
                time.sleep(0.001)
        return look(pid, as_zombie=as_zombie)

    monkeypatch.setattr(processes, "_started", end_at_the_last_look)
    stop_process(identity, ask=signal.SIGCONT)
    assert not psutil.pid_exists(identity.pid)


def test_the_status_of_a_later_child_with_the_same_id_is_left_to_its_owner(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "exit 7"]) as child:
        while identify_process(child.pid) is not None:
            time.sleep(0.01)
        stop_process(ProcessIdentity(child.pid, "another boot:1"))
        assert child.wait() == 7


def test_another_process_with_the_same_id_is_not_taken_for_it(tmp_path: Path) -> None:
    identity = start(["sleep", "60"], tmp_path)
    impostor = ProcessIdentity(identity.pid, "another boot:1")
    write_pid_file(tmp_path / "pid", impostor)
    assert find_process(tmp_path / "pid") is None
    stop_process(impostor)
    assert identity.is_running
    stop_process(identity)


@pytest.mark.parametrize("content", [b"", b"12", b"[]", b'{"pid": "x", "started": 1}', b"\xff", b'{"pid": 1}'])
def test_a_damaged_pid_file_names_no_process(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pid").write_bytes(content)
    assert find_process(tmp_path / "pid") is None
    assert find_process(tmp_path / "missing") is None


@pytest.mark.parametrize("mode", ["attached", "detached"])
def test_an_attached_process_dies_with_a_killed_starter_a_detached_one_lives(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path), mode]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        identity = identify_process(pid)
        assert identity is not None
        os.kill(starter.pid, signal.SIGKILL)
    if mode == "attached":
        assert wait_until_gone(pid)
    else:
        assert identity.is_running
        stop_process(identity)
        assert wait_until_gone(pid)


def test_a_process_that_ignores_being_asked_is_killed_with_its_children(tmp_path: Path) -> None:
    script = "trap '' TERM; sleep 60 & echo $! > child; wait; wait"
    identity = start(["sh", "-c", script], tmp_path)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    stop_process(identity, timeout_s=0.3)
    assert not identity.is_running
    assert wait_until_gone(child)


def test_what_can_not_be_started_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no-such-program"):
        start(["/no-such-program"], tmp_path)
    failures: list[ServiceError] = []

    def start_attached() -> None:
        try:
            start(["sleep", "1"], tmp_path, attached=True)
        except ServiceError as error:
            failures.append(error)

    thread = threading.Thread(target=start_attached)
    thread.start()
    thread.join()
    assert "main thread" in str(failures[0])


def test_free_ports_are_free_with_their_twins() -> None:
    ports = find_free_ports(5, twin_offset=10_000)
    taken = {*ports, *(port + 10_000 for port in ports)}
    assert len(taken) == 10
    assert max(taken) < 32_768
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        assert not is_port_free(ports[0])
    assert is_port_free(ports[0])
