"""What the stack keeps between commands: `.dflash/stack.json`, and the lock that lets one change it at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.errors import ServiceError
from embedded.postgres import PostgresCluster
from embedded.prefect_api import LocalPrefectApi
from embedded.processes import ProcessIdentity, write_private

FOLDER = ".dflash"
LOCK_TIMEOUT_S = 300


class StackState(BaseModel):
    """Content of `stack.json`; holds no secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    prefect_port: int = Field(ge=1, le=65535, description="Kept over restarts, so that bookmarks stay valid.")
    database: Literal["sqlite", "postgres"] = Field(default="sqlite", description="Where Prefect keeps its records.")
    processes: dict[str, ProcessIdentity] = Field(default={}, description="Prefect server and workers by part name.")
    set_up: str | None = Field(default=None, description="Digest of the deployments and the code that was deployed.")

    @property
    def api(self) -> LocalPrefectApi:
        """The Prefect server."""
        return LocalPrefectApi(self.prefect_port)

    def running(self, part: str) -> ProcessIdentity | None:
        """The process of a part, None where it doesn't run."""
        process = self.processes.get(part)
        return process if process is not None and process.is_running else None


class StackFolder:
    """The folder `.dflash` of one project.

    Args:
        project: the project folder.
    """

    def __init__(self, project: Path) -> None:
        self.project = project.resolve()
        self.path = self.project / FOLDER
        self.home = self.path / "prefect"
        self.s3 = self.path / "s3"
        self.logs = self.path / "logs"
        self.postgres = PostgresCluster(self.path / "postgres")

    def database(self, state: StackState) -> PostgresCluster | None:
        """The database of Prefect's server where it isn't SQLite."""
        return self.postgres if state.database == "postgres" else None

    @property
    def marker(self) -> str:
        """What marks the processes of this stack in their environment."""
        return str(self.path)

    def create(self) -> None:
        """Make the folders; only their owner may look inside."""
        if not self.path.exists():
            self.path.mkdir(mode=0o700, parents=True)
        for folder in (self.home, self.s3, self.logs, self.path / "results"):
            folder.mkdir(mode=0o700, exist_ok=True)

    def read(self) -> StackState | None:
        """The state, None where no stack was ever started.

        Raises:
            ServiceError: the file can't be understood.
        """
        path = self.path / "stack.json"
        try:
            return StackState.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ServiceError(
                f"{path} is not a state of version 1 of `dflash up`: {error.errors()[0]['msg']}; run "
                "`dflash down`, remove the file, and run `dflash up`"
            ) from error

    def write(self, state: StackState) -> None:
        """Replace the state in one step."""
        write_private(self.path / "stack.json", state.model_dump_json(indent=2))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one `up` or `down` of this stack run at a time; the kernel frees the lock of a killed one.

        Raises:
            ServiceError: another one holds the lock for longer than `LOCK_TIMEOUT_S`.
        """
        file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise ServiceError(
                            f"another `dflash up` or `down` has held {self.path / 'lock'} for {LOCK_TIMEOUT_S} s"
                        ) from error
                    time.sleep(0.2)
            yield
        finally:
            os.close(file)
