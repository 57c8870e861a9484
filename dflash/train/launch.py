"""Start a trainer as a process of its own and stop it so that its checkpoint is saved; needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from dflash import errors
from dflash.errors import TrainingError
from dflash.storage import S3Credentials, parse_uri
from dflash.train.leash import Leash
from dflash.train.run import TrainRun

POLL_S = 0.2
_AFTER_SIGTERM_S = 10.0


class TrainJob(BaseModel):
    """What a trainer process is told.

    Attributes:
        run: the parameters.
        work: see `dflash.train.job.Places`.
        endpoint_url: of S3; keys travel in the environment, never in this file.
        region: of S3.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: TrainRun
    work: Path
    endpoint_url: str | None = None
    region: str = "us-east-1"


class Trainer:
    """A trainer process with all its ranks; use it as a context manager, which stops it.

    Args:
        run: the parameters.
        work: folder for job files, and see `dflash.train.job.Places`.
        credentials: for S3.
        environment: of the process, without S3 keys.
    """

    def __init__(
        self, run: TrainRun, work: Path, credentials: S3Credentials | None, environment: Mapping[str, str]
    ) -> None:
        self.run = run
        self._job = work / "jobs" / f"{os.getpid()}-{time.time_ns()}.json"
        self.log = self._job.with_suffix(".log")
        s3 = credentials or S3Credentials()
        self._content = TrainJob(run=run, work=work.absolute(), endpoint_url=s3.endpoint_url, region=s3.region)
        self._environment = dict(environment) | _keys(s3)
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it, in a session of its own: what kills its starter doesn't reach it before it has saved."""
        self._job.parent.mkdir(parents=True, exist_ok=True)
        self._job.write_text(self._content.model_dump_json(), encoding="utf-8")
        self._leash = self._stack.enter_context(Leash(self._job))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop it if it still runs, with time to save; then kill what is left. The log of a failure is kept."""
        try:
            self.stop()
        finally:
            self._stack.close()
            assert self._process is not None
            for path in self._job.parent.glob(f"{self._job.stem}.*"):
                if path != self.log or not self._process.returncode:
                    path.unlink()

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        assert self._process is not None
        return self._process.poll() is None

    def wait(self, on_poll: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait in short steps, so that a signal is answered between them; return the trainer's result.

        Raises:
            DflashError: what the trainer raised.
            TrainingError: it died; the message has the end of its log.
        """
        while self.is_running:
            on_poll()
            time.sleep(POLL_S)
        on_poll()
        return self._result()

    def ask_to_stop(self) -> None:
        """Let it save and end after its step."""
        self._leash.ask_to_stop()

    def stop(self) -> None:
        """Ask it to save and end, wait for the run's grace, then SIGTERM, then SIGKILL, its whole group."""
        assert self._process is not None
        if self.is_running:
            self.ask_to_stop()
            if not self._ended_within(self.run.stop_grace_s):
                self._signal(signal.SIGTERM)
                self._ended_within(_AFTER_SIGTERM_S)
        self._signal(signal.SIGKILL)  # ranks that outlived their starter
        self._process.wait()

    def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return not self.is_running

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _command(self) -> list[str]:
        if self.run.num_processes == 1:
            return [sys.executable, "-m", "dflash.train.main", str(self._job)]
        return [sys.executable, "-m", "dflash.train.start_ranks", str(self.run.num_processes), str(self._job)]

    def _result(self) -> dict[str, Any]:
        path = result_path(self._job)
        result: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        if "error" in result:
            kind = getattr(errors, result["error"], TrainingError)
            raise kind(result["message"])
        assert self._process is not None
        if not result or self._process.returncode:
            raise TrainingError(
                f"The trainer ended with code {self._process.returncode} and no result; its newest checkpoint is kept. "
                f"Its log, {self.log}, ends with:\n{_tail(self.log)}"
            )
        return result


def run_dir_of(output: str, work: Path) -> Path:
    """Return the local run folder of an output: itself, or for S3 a folder of its own in `work`."""
    location = parse_uri(output)
    if location.scheme == "file":
        return Path(location.path)
    return work / "runs" / hashlib.sha256(location.uri.encode()).hexdigest()[:16]


def result_path(job: Path) -> Path:
    """Where a trainer writes its result."""
    return job.with_suffix(".result.json")


def write_result(job: Path, result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all; an error of one rank isn't replaced by that of another."""
    path = result_path(job)
    if path.exists():
        return
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(path)


def _keys(credentials: S3Credentials) -> dict[str, str]:
    """The variables in which S3 clients look for keys."""
    secret, token = credentials.secret_access_key, credentials.session_token
    if credentials.access_key_id is None or secret is None:
        return {}
    keys = {"AWS_ACCESS_KEY_ID": credentials.access_key_id, "AWS_SECRET_ACCESS_KEY": secret.get_secret_value()}
    return keys if token is None else keys | {"AWS_SESSION_TOKEN": token.get_secret_value()}


def _tail(log: Path, num_lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
