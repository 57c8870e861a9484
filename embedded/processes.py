"""Child processes that die with their starter, or outlive it and are found again; and ports for them.

A process is known by its id together with its start time since boot and the boot itself, since ids are reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dflash.errors import ServiceError

# Ids of clients' own ports start here on Linux; a server port there may be taken at any moment.
_FIRST_EPHEMERAL_PORT = 32768
_FIRST_PORT = 12000

# Asks the kernel to kill this process with the thread that started it, then becomes the command.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starter is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that can't be mistaken for a later one with its id.

    Attributes:
        pid: process id.
        started: boot id and start time in clock ticks since boot.
    """

    pid: int
    started: str

    @property
    def is_running(self) -> bool:
        """Whether this very process still runs; a zombie doesn't."""
        return _started(self.pid) == self.started


def start_process(
    command: Sequence[str],
    *,
    log: Path,
    folder: Path,
    environment: Mapping[str, str],
    attached: bool,
    user: str | None = None,
) -> ProcessIdentity:
    """Start a process in its own session, its output appended to a log.

    Args:
        command: program and arguments.
        log: file for stdout and stderr, made with mode 0600.
        folder: working folder.
        environment: the whole environment of the process.
        attached: True: the kernel kills it when the caller dies, however that happens; only from the main thread, since
            the kernel watches the starting thread. False: it lives on until `stop_process`.
        user: whom it runs as, with that user's own group alone; only root may name another than itself.

    Raises:
        ServiceError: the program can't be started, or `attached` from another thread.
    """
    if attached:
        if threading.current_thread() is not threading.main_thread():
            raise ServiceError(
                f"{command[0]}: a process that dies with its starter is started from the main thread only"
            )
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    account = None if user is None else pwd.getpwnam(user)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            user=None if account is None else account.pw_uid,
            group=None if account is None else account.pw_gid,
            extra_groups=None if account is None else [],
        )
    except OSError as error:
        raise ServiceError(f"{command[0]}: can't be started: {error}") from error
    finally:
        os.close(descriptor)
    identity = identify_process(process.pid)
    process.returncode = 0  # from here on it is known by its identity; the object would warn that it still runs
    if identity is None:
        raise ServiceError(f"{command[0]}: ended at once; its log is {log}:\n{tail(log)}")
    return identity


def stop_process(identity: ProcessIdentity, *, timeout_s: float = 10.0, ask: signal.Signals = signal.SIGTERM) -> None:
    """Ask a process to end, and kill it with all its children after the timeout; one that is gone is passed over.

    Args:
        identity: the process.
        timeout_s: how long it may take after being asked.
        ask: the signal that asks it.

    Raises:
        ServiceError: it lives on although it was killed.
    """
    family = [identity, *_descendants(identity)]
    if identity.is_running:
        _signal(identity, ask)
    alive = _wait(family, timeout_s)
    for member in alive:
        _signal(member, signal.SIGKILL)
    alive = _wait(alive, timeout_s)
    if alive:
        raise ServiceError(f"process {alive[0].pid} did not end {timeout_s} s after it was killed; end it by hand")


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process; None if there is none with this id."""
    started = _started(pid)
    return None if started is None else ProcessIdentity(pid, started)


def write_pid_file(path: Path, identity: ProcessIdentity) -> None:
    """Write a pid file, whole or not at all."""
    write_private(path, json.dumps(asdict(identity)))


def find_process(path: Path) -> ProcessIdentity | None:
    """Return the process of a pid file; None where the file is missing or unreadable or its process is gone."""
    try:
        fields = json.loads(path.read_bytes())
        identity = ProcessIdentity(int(fields["pid"]), str(fields["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return identity if identity.is_running else None


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone may read, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    part.replace(path)


def find_free_ports(count: int, *, twin_offset: int = 0) -> list[int]:
    """Find free loopback ports below the range that clients' own ports are taken from.

    They are free now; another process may take them before the server does, so a failed start is worth another try.

    Args:
        count: how many.
        twin_offset: if positive, `port + twin_offset` is free as well, for servers that take both.

    Raises:
        ServiceError: the machine has not so many free ports.
    """
    last = _FIRST_EPHEMERAL_PORT - 1 - twin_offset
    # A server that takes pairs must not be given the twin of one port as another.
    candidates = range(_FIRST_PORT, min(last, _FIRST_PORT + twin_offset) if twin_offset else last)
    found: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        if is_port_free(port) and (not twin_offset or is_port_free(port + twin_offset)):
            found.append(port)
        if len(found) == count:
            return found
    raise ServiceError(f"this machine has no {count} free ports between {_FIRST_PORT} and {last}; stop other servers")


def is_port_free(port: int) -> bool:
    """Tell whether a server could listen on a loopback port right now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def tail(log: Path, *, num_lines: int = 20) -> str:
    """Return the last lines of a log, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(lines[-num_lines:])


def _started(pid: int, *, as_zombie: bool = False) -> str | None:
    """When a process started, None if it doesn't run; with `as_zombie` also of one that only waits to be collected."""
    folder = Path(f"/proc/{pid}")
    try:
        stat = (folder / "stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *rest = stat.rpartition(")")[2].split()
        # While other threads are still ending, a killed process looks like a zombie, yet holds its ports and locks.
        if not as_zombie and state in {"Z", "X"} and sum(1 for _ in (folder / "task").iterdir()) <= 1:
            return None
    except OSError:
        return None
    return f"{boot}:{rest[18]}"


def _descendants(identity: ProcessIdentity) -> list[ProcessIdentity]:
    if not identity.is_running:
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(identity.pid).children(recursive=True)
        return [found for child in children if (found := identify_process(child.pid)) is not None]
    return []


def _signal(identity: ProcessIdentity, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(identity.pid, number)


def _wait(processes: Sequence[ProcessIdentity], timeout_s: float) -> list[ProcessIdentity]:
    """Wait for processes to end; return those that still run."""
    deadline = time.monotonic() + timeout_s
    alive = list(processes)
    while True:
        # Looked at first, collected then: one that ends in between counts as alive until the next look.
        ended = [process for process in alive if not process.is_running]
        for process in ended:
            _collect(process)
        alive = [process for process in alive if process not in ended]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.02)


def _collect(process: ProcessIdentity) -> None:
    """Take the status that an ended child leaves, so that no zombie stays; never that of a later one with its id."""
    if _started(process.pid, as_zombie=True) == process.started:
        with contextlib.suppress(ChildProcessError):  # somebody else's child
            os.waitpid(process.pid, os.WNOHANG)
