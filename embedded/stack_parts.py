"""The parts of the stack: which run, which answer, and how one that doesn't is started."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from dflash.errors import ServiceError
from embedded.marked import find_marked_command
from embedded.prefect_server import server_command, start_prefect_server, wait_for_prefect_server
from embedded.processes import (
    ProcessIdentity,
    find_free_ports,
    find_process,
    is_port_free,
    start_process,
    stop_process,
    tail,
)
from embedded.seaweedfs import find_seaweedfs
from embedded.stack_set_up import set_up_environment
from embedded.stack_state import StackFolder, StackState

OBJECT_STORE = "object-store"
DATABASE = "postgres"
SERVER = "prefect-server"
WORKERS = {"cpu": "worker-cpu", "b200": "worker-b200"}
"""Part names of the workers by work pool."""

WORKER_TIMEOUT_S = 180
SILENCE_S = 60
"""Six heartbeats: a worker that was silent for longer is unhealthy. Prefect's own state of it flaps under load."""

STUCK_TIMEOUT_S = 30
"""How long a server that ran before may stay silent until it is started anew."""

Health = Literal["healthy", "unhealthy", "dead"]


@dataclass(frozen=True, slots=True)
class PartStatus:
    """One part.

    Attributes:
        name: part name.
        pid: its process, None where there is none.
        port: where it listens; None for workers, which only call, for PostgreSQL, which has a unix socket, and for an
            object store that doesn't run.
        health: `dead` without a process, `unhealthy` when the process doesn't answer.
    """

    name: str
    pid: int | None
    port: int | None
    health: Health


def look_at_parts(folder: StackFolder, state: StackState) -> tuple[PartStatus, ...]:
    """Status of each part, asked now."""
    store_process, store = find_process(folder.s3 / "weed.pid"), find_seaweedfs(folder.s3)
    database = folder.database(state)
    databases = () if database is None else (_status(DATABASE, database.process(), None, answers=database.answers()),)
    return (
        _status(OBJECT_STORE, store_process, store.ports["s3"] if store else None, answers=store is not None),
        *databases,
        _status(SERVER, state.running(SERVER), state.prefect_port, answers=state.api.is_healthy()),
        *(_status(part, state.running(part), None, answers=_is_online(state, pool)) for pool, part in WORKERS.items()),
    )


def ensure_server(folder: StackFolder, state: StackState) -> StackState:
    """Start the Prefect server unless it runs; doesn't wait for it."""
    process = _find_part(folder, state, SERVER, server_command())
    if process is None:
        if not is_port_free(state.prefect_port):
            # Another program took it meanwhile. The workers talk to the old address: they are started anew.
            for part in WORKERS.values():
                _stop_part(state, part)
            state = state.model_copy(update={"prefect_port": find_free_ports(1)[0]})
        process = start_prefect_server(folder.home, state.api, folder.marker, database=folder.database(state))
    return _record(folder, state, SERVER, process)


def wait_for_server(folder: StackFolder, state: StackState) -> StackState:
    """Wait for the server; one that ran before and hangs is started anew.

    Raises:
        ServiceError: it doesn't answer.
    """
    process = state.processes[SERVER]
    if _age_s(process) > STUCK_TIMEOUT_S:
        deadline = time.monotonic() + STUCK_TIMEOUT_S
        while process.is_running and not state.api.is_healthy() and time.monotonic() < deadline:
            time.sleep(0.5)
        if not state.api.is_healthy():
            _stop_part(state, SERVER)
            process = start_prefect_server(folder.home, state.api, folder.marker, database=folder.database(state))
            state = _record(folder, state, SERVER, process)
    wait_for_prefect_server(folder.home, state.api, process, folder.database(state))
    return state


def stop_workers_without_pool(state: StackState) -> None:
    """Stop each worker whose pool was deleted: it ends at its next call, though the pool be made again meanwhile."""
    for pool, part in WORKERS.items():
        if state.running(part) is not None:
            named = {"work_pools": {"name": {"any_": [pool]}}}
            if state.api.post("/work_pools/count", named) == 0:
                _stop_part(state, part)


def ensure_workers(folder: StackFolder, state: StackState) -> StackState:
    """Start each worker that doesn't run; doesn't wait for them."""
    for pool, part in WORKERS.items():
        command = worker_command(pool)
        process = _find_part(folder, state, part, command)
        if process is None:
            process = start_process(
                command,
                log=_worker_log(folder, part),
                folder=folder.project,
                environment=set_up_environment(folder),
                attached=False,
            )
        state = _record(folder, state, part, process)
    return state


def wait_for_workers(folder: StackFolder, state: StackState) -> None:
    """Wait until each worker has told the server that it is there.

    Raises:
        ServiceError: one ended or did not report in time; the message has the end of its log.
    """
    deadline = time.monotonic() + WORKER_TIMEOUT_S
    for pool, part in WORKERS.items():
        while not _is_online(state, pool):
            if state.running(part) is None or time.monotonic() > deadline:
                log = _worker_log(folder, part)
                raise ServiceError(f"{part} did not report to the server; its log {log} ends with:\n{tail(log)}")
            time.sleep(0.2)


def worker_command(pool: str) -> list[str]:
    """Command line of a worker; the server's address is in its profile."""
    options = ["--pool", pool, "--name", WORKERS[pool], "--type", "process", "--install-policy", "never"]
    return [sys.executable, "-P", "-m", "prefect", "worker", "start", *options, "--no-create-pool-if-not-found"]


def _status(name: str, process: ProcessIdentity | None, port: int | None, *, answers: bool) -> PartStatus:
    if process is None:
        return PartStatus(name, None, port, "dead")
    return PartStatus(name, process.pid, port, "healthy" if answers else "unhealthy")


def _find_part(folder: StackFolder, state: StackState, part: str, command: Sequence[str]) -> ProcessIdentity | None:
    """The running process of a part: the recorded one, else one whose record was lost by a killed `up`."""
    process = state.running(part)
    if process is not None:
        return process
    return find_marked_command(folder.marker, lambda found: found == list(command))


def _stop_part(state: StackState, part: str) -> None:
    process = state.running(part)
    if process is not None:
        stop_process(process)


def _record(folder: StackFolder, state: StackState, part: str, process: ProcessIdentity) -> StackState:
    state = state.model_copy(update={"processes": {**state.processes, part: process}})
    folder.write(state)
    return state


def _is_online(state: StackState, pool: str) -> bool:
    """Whether the server has heard of this very process of the pool's worker lately."""
    process = state.running(WORKERS[pool])
    if process is None:
        return False
    try:
        workers: list[dict[str, Any]] = state.api.post(f"/work_pools/{pool}/workers/filter", {})
    except ServiceError:
        return False
    # What it told a server that was killed since doesn't count, nor what an earlier worker of that name told.
    server = state.running(SERVER)
    youngest_s = min(_age_s(part) for part in (process, server) if part is not None)
    for worker in workers:
        if worker["name"] == WORKERS[pool]:
            heartbeat = datetime.fromisoformat(worker["last_heartbeat_time"])
            return time.time() - heartbeat.timestamp() < min(youngest_s, SILENCE_S)
    return False


def _age_s(process: ProcessIdentity) -> float:
    """Seconds since the process started; 0 where it is gone."""
    try:
        return time.time() - float(psutil.Process(process.pid).create_time())
    except psutil.NoSuchProcess:
        return 0.0


def _worker_log(folder: StackFolder, part: str) -> Path:
    return folder.logs / f"{part}.log"
