"""The embedded stack of one project folder: `up`, `down`, `status`, and how other commands find it.

`up` looks at each part and starts what doesn't run, so that calling it again repairs whatever was killed. Ports, data
and credentials are kept in `.dflash/` over restarts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash.errors import ServiceError, UsageError
from dflash.storage import S3Credentials
from dflash.storage.files import os_errors_as_storage_errors
from embedded.marked import find_marked, stop_all
from embedded.prefect_server import temporary_prefect_server
from embedded.prefect_settings import activate_settings, check_path
from embedded.processes import find_free_ports, find_process
from embedded.seaweedfs import find_seaweedfs, start_seaweedfs, stop_seaweedfs
from embedded.stack_parts import (
    SERVER,
    WORKERS,
    PartStatus,
    ensure_server,
    ensure_workers,
    look_at_parts,
    stop_workers_without_pool,
    wait_for_server,
    wait_for_workers,
)
from embedded.stack_set_up import SetUp, compute_digest, is_set_up, read_entrypoints
from embedded.stack_state import StackFolder, StackState

REPOSITORY = Path(__file__).resolve().parents[1]
DEPLOYMENTS = REPOSITORY / "deployments" / "prefect.yaml"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StackStatus:
    """What runs.

    Attributes:
        project: the project folder.
        ui_url: address of the Prefect UI.
        parts: object store, PostgreSQL if used, server and workers, in this order; empty where no stack was started.
    """

    project: Path
    ui_url: str | None
    parts: tuple[PartStatus, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether every part works."""
        return bool(self.parts) and all(part.health == "healthy" for part in self.parts)


@dataclass(frozen=True, slots=True)
class StackConnection:
    """What a command needs to use a running stack.

    Attributes:
        prefect_api_url: address for Prefect's clients.
        s3: endpoint and credentials of the object store.
        bucket: the bucket that exists there.
        home: PREFECT_HOME of the stack.
        project: the project folder.
    """

    prefect_api_url: str
    s3: S3Credentials
    bucket: str
    home: Path
    project: Path


def up(
    project: Path, say: Say, deployments: Path = DEPLOYMENTS, *, database: Literal["sqlite", "postgres"] | None = None
) -> StackStatus:
    """Start or repair the stack of a project folder; returns when every part answers.

    Args:
        project: the folder that gets `.dflash/`, and in which flow runs work.
        say: takes one line for each part that is ready.
        deployments: the Prefect deployments file to apply; pool templates lie in `pools/` beside it.
        database: where Prefect keeps its records; as before where it isn't said, at first in SQLite.

    Raises:
        UsageError: the folder's path or the deployments file can't be used, or the server runs on the other database.
        ServiceError: a part did not start; the message has the end of its log.
        StorageError: the folder can't be written, or the disk is full.
    """
    folder = StackFolder(project)
    check_path(folder.path)
    with os_errors_as_storage_errors(str(folder.path)):
        _start(folder, say, deployments, database)
    return status(project)


def _start(folder: StackFolder, say: Say, deployments: Path, database: Literal["sqlite", "postgres"] | None) -> None:
    folder.create()
    with folder.locked(), ThreadPoolExecutor(1) as executor:
        state = _choose_database(folder.read() or StackState(prefect_port=find_free_ports(1)[0]), database)
        starting_store = executor.submit(start_seaweedfs, folder.s3, marker=folder.marker)
        if (postgres := folder.database(state)) is not None:
            postgres.start()
        state = ensure_server(folder, state)
        store = starting_store.result()
        say(f"object store    {store.endpoint_url}, bucket {store.bucket}")
        if postgres is not None:
            say(f"PostgreSQL      socket in {postgres.directory}")
        digest = compute_digest(folder, deployments)
        set_up = SetUp.start(folder, deployments) if state.set_up != digest else None
        state = wait_for_server(folder, state)
        say(f"Prefect server  {state.api.ui_url}")
        stop_workers_without_pool(state)
        if set_up is None and not is_set_up(state, deployments):
            set_up = SetUp.start(folder, deployments)
        if set_up is not None:
            set_up.wait_for("pools")
        state = ensure_workers(folder, state)
        if set_up is not None:
            set_up.wait_for("deployments")
            state = state.model_copy(update={"set_up": digest})
            folder.write(state)
            say(f"deployments     {', '.join(sorted(read_entrypoints(deployments)))}")
        wait_for_workers(folder, state)
        say(f"workers         {', '.join(WORKERS)}")


def down(project: Path, say: Say) -> None:
    """End every process of the stack, with the flow runs that its workers started; data and ports stay.

    Raises:
        ServiceError: the lock is held by another `up` or `down`.
        StorageError: the folder can't be written; all processes have ended then.
    """
    folder = StackFolder(project)
    if not folder.path.is_dir():
        say(f"no stack was started in {folder.project}")
        return
    with os_errors_as_storage_errors(str(folder.path)), folder.locked():
        state = _read_or_none(folder)
        server = state.running(SERVER) if state else None
        # Workers and their flow runs first, while the server can still record how the runs ended.
        last = {part.pid for part in (server, find_process(folder.s3 / "weed.pid")) if part is not None}
        stop_all([process for process in find_marked(folder.marker) if process.pid not in last], grace_s=10)
        if state is not None and server is not None:
            _crash_unfinished_runs(state)
        stop_seaweedfs(folder.s3)
        stop_all(find_marked(folder.marker), grace_s=10)
        folder.postgres.stop()  # last: the server ends its connections first
        if state is not None:
            folder.write(state.model_copy(update={"processes": {}}))
    say(f"stopped the stack in {folder.project}; `dflash up` starts it again with the same data and ports")


def status(project: Path) -> StackStatus:
    """Look at every part, without changing anything.

    Raises:
        ServiceError: the state file can't be understood.
    """
    folder = StackFolder(project)
    state = folder.read()
    if state is None:
        return StackStatus(folder.project, None, ())
    return StackStatus(folder.project, state.api.ui_url, look_at_parts(folder, state))


def find_stack(project: Path) -> StackConnection | None:
    """The running stack of a project folder, None where the server or the object store doesn't answer."""
    folder = StackFolder(project)
    state = folder.read()
    if state is None or state.running(SERVER) is None or not state.api.is_healthy():
        return None
    store = find_seaweedfs(folder.s3)
    if store is None:
        return None
    return StackConnection(state.api.url, store.credentials, store.bucket, folder.home, folder.project)


def connect(project: Path) -> StackConnection:
    """The running stack of a project folder.

    Raises:
        ServiceError: none runs there.
    """
    connection = find_stack(project)
    if connection is None:
        raise ServiceError(f"no stack runs in {project.resolve()}; start it there with `dflash up`")
    return connection


def activate(connection: StackConnection) -> None:
    """Point Prefect in this process at a stack; best called before Prefect is imported."""
    folder = StackFolder(connection.project)
    state = folder.read()
    if state is None:
        raise ServiceError(f"the stack in {connection.project} is gone; start it with `dflash up`")
    activate_settings(state.api, connection.home)
    os.environ["DFLASH_HOME"] = str(folder.path)


@contextlib.contextmanager
def prefect_for_run(project: Path) -> Iterator[None]:
    """Give one run its Prefect server: the one the environment names, else the stack's, else a temporary one."""
    if os.environ.get("PREFECT_API_URL"):
        yield
        return
    connection = find_stack(project)
    if connection is not None:
        activate(connection)
        yield
        return
    with temporary_prefect_server():
        yield


def _choose_database(state: StackState, wanted: Literal["sqlite", "postgres"] | None) -> StackState:
    """The state with the database that is wanted.

    Raises:
        UsageError: the server runs on the other one.
    """
    if wanted in {None, state.database}:
        return state
    if state.running(SERVER) is not None:
        raise UsageError(
            f"the Prefect server runs on {state.database}, expected {wanted}: run `dflash down` first. Each database "
            "keeps its own history of runs; datasets are not touched."
        )
    return state.model_copy(update={"database": wanted, "set_up": None})


def _read_or_none(folder: StackFolder) -> StackState | None:
    """The state if it can be read: `down` also works without, by the marker of the processes."""
    try:
        return folder.read()
    except ServiceError:
        return None


def _crash_unfinished_runs(state: StackState) -> None:
    """Tell the server that the runs it takes for running have ended, so that none runs forever in the UI."""
    unfinished = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}}
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "ended by `dflash down`"}
    with contextlib.suppress(ServiceError):
        told: set[str] = set()
        # The server gives 200 at a time; one that it leaves as it is must not be told for ever.
        while new := {run["id"] for run in state.api.post("/flow_runs/filter", unfinished)} - told:
            for run in new:
                state.api.post(f"/flow_runs/{run}/set_state", {"state": crashed, "force": True})
            told |= new
