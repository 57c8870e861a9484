"""The embedded object store: private, re-attachable, repaired after a kill, and gone when stopped."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dflash.errors import ServiceError
from dflash.storage import open_store
from embedded.marked import find_marked
from embedded.processes import identify_process
from embedded.seaweedfs import SeaweedConfig, SeaweedServer, find_seaweedfs, start_seaweedfs, stop_seaweedfs

REPOSITORY = Path(__file__).resolve().parents[2]
STARTER = """
import sys
from pathlib import Path
from embedded.seaweedfs import SeaweedConfig, start_seaweedfs
print(start_seaweedfs(Path(sys.argv[1]), SeaweedConfig(bucket="other")).pid)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    directory = tmp_path_factory.mktemp("embedded") / "s3"
    yield start_seaweedfs(directory, SeaweedConfig(attached=True))
    stop_seaweedfs(directory)
    assert find_seaweedfs(directory) is None


def test_it_listens_on_loopback_alone_and_keeps_its_secrets(server: SeaweedServer) -> None:
    connections = psutil.Process(server.pid).net_connections("inet")
    listening = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    expected = {port + twin for port in server.ports.values() for twin in (0, 10_000)}
    assert {address.port for address in listening} == expected
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    secret = server.credentials.secret_access_key
    assert secret is not None
    for path in server.directory.iterdir():
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    arguments = psutil.Process(server.pid).cmdline()
    environment = psutil.Process(server.pid).environ()
    assert secret.get_secret_value() not in f"{arguments}{environment}"
    assert "-master.telemetry=false" in arguments


def test_a_second_start_attaches(server: SeaweedServer) -> None:
    again = start_seaweedfs(server.directory)
    assert again == find_seaweedfs(server.directory) == server


def test_a_start_finds_the_server_of_a_starter_that_was_killed_before_it_wrote_the_pid_file(
    server: SeaweedServer,
) -> None:
    assert [process.pid for process in find_marked(str(server.directory))] == [server.pid]
    (server.directory / "weed.pid").unlink()
    assert find_seaweedfs(server.directory) is None
    assert start_seaweedfs(server.directory, SeaweedConfig(attached=True)) == server
    assert find_seaweedfs(server.directory) == server


def test_a_command_that_has_ended_leaves_it_to_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "s3")]
    pid = int(subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout)
    try:
        first = find_seaweedfs(tmp_path / "s3", SeaweedConfig(bucket="other"))
        assert first is not None
        assert first.pid == pid
        open_store(first.uri, first.credentials).put_if_absent("kept", b"content")
        os.kill(pid, signal.SIGKILL)
        repaired = start_seaweedfs(tmp_path / "s3", SeaweedConfig(bucket="other"))
        assert repaired.pid != pid
        assert (repaired.endpoint_url, repaired.credentials) == (first.endpoint_url, first.credentials)
        assert open_store(repaired.uri, repaired.credentials).read("kept") == b"content"
    finally:
        assert stop_seaweedfs(tmp_path / "s3")
    assert identify_process(repaired.pid) is None
    assert not stop_seaweedfs(tmp_path / "s3")


@pytest.mark.parametrize(
    "content",
    [
        '{"access_key_id": 1}',
        '{"secret_access_key": "hidden", "access_key_id": "hid',
        '{"secret_access_key": "hidden", "access_key_id": "a", "ports": {"s3": 12000}}',
        '{"secret_access_key": "hidden", "access_key_id": "a", "ports": {"s3": 99999}}',
        '{"secret_access_key": "", "access_key_id": "a", "ports": {}}',
    ],
)
def test_a_damaged_state_is_named_and_its_secret_is_not(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)
    with pytest.raises(ServiceError, match=r"server\.json is damaged") as refused:
        start_seaweedfs(tmp_path)
    assert "hid" not in str(refused.value)
    assert refused.value.__suppress_context__
    assert not stop_seaweedfs(tmp_path)  # `dflash down` still ends the other parts


def test_a_server_that_never_answers_is_an_error_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "filerldb2").write_text("a file where the server needs a folder")
    with pytest.raises(ServiceError, match="did not answer"):
        start_seaweedfs(tmp_path, SeaweedConfig(attached=True, start_attempts=1, ready_timeout_s=4))
    assert find_seaweedfs(tmp_path) is None
