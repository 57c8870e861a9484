from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tomllib
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dflash.errors import ServiceError
from embedded import prefect_server
from embedded.marked import find_marked
from embedded.prefect_api import LocalPrefectApi
from embedded.prefect_server import template_path, temporary_prefect_server
from embedded.prefect_settings import fixed_environment, process_environment, write_profile
from embedded.processes import find_free_ports, start_process

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "dflash").mkdir(parents=True)
    return tmp_path / "cache"


def make_database(path: Path, *, num_flow_runs: int = 0, num_block_types: int = 1) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        for table in (*prefect_server._TEMPLATE_TABLES, *prefect_server._EMPTY_TABLES):
            database.execute(f"create table {table} (name text)")
        for table in ("configuration", "events", "event_resources"):
            database.execute(f"create table {table} (name text)")
            database.execute(f"insert into {table} values ('secret')")  # noqa: S608
        for table, count in (
            ("alembic_version", 1),
            ("block_schema", 1),
            ("block_type", num_block_types),
            ("flow_run", num_flow_runs),
        ):
            database.executemany(f"insert into {table} values (?)", [("x",)] * count)  # noqa: S608
        database.commit()


def test_temporary_server_serves_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.logging.handlers import APILogHandler

    handler = APILogHandler()
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    before = dict(os.environ)
    with temporary_prefect_server() as api:
        assert api.is_healthy()
        assert os.environ["PREFECT_API_URL"] == api.url
        home = Path(os.environ["PREFECT_HOME"])
        (process,) = find_marked(str(home.parent))
        assert {connection.laddr.ip for connection in process.net_connections() if connection.status == "LISTEN"} == {
            "127.0.0.1"
        }
        assert api.get("/admin/settings")["server"]["analytics_enabled"] is False
        assert template_path().exists()
        assert template_path().stat().st_mode & 0o077 == 0
        about_run = {"flow_run_id": uuid.uuid4(), "levelno": logging.INFO}
        record = logging.makeLogRecord({"name": "prefect.flow_runs", "msg": "the last", **about_run})
        handler.emit(record)
    capsys.readouterr()
    handler.flush()  # what is still pending goes to a server that has ended
    assert "Error logging to API" not in capsys.readouterr().err
    assert dict(os.environ) == before
    assert not process.is_running()
    assert not home.exists()


def test_temporary_server_ends_with_a_killed_command_and_the_next_removes_its_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from embedded import prefect_server\n"
        "prefect_server.wait_for_prefect_server = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with prefect_server.temporary_prefect_server():\n"
        "    pass\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=env, check=False)
    assert killed.returncode == -signal.SIGKILL
    (folder,) = tmp_path.glob(f"{prefect_server._FOLDER_PREFIX}*")
    deadline = time.monotonic() + 60
    while find_marked(str(folder)):
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        with prefect_server._temporary_folder() as first, prefect_server._temporary_folder() as second:
            assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert list(tmp_path.iterdir()) == []


def test_template_is_copied_without_what_belongs_to_one_server(tmp_path: Path, cache: Path) -> None:
    make_database(template_path())
    prefect_server._copy_template(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "prefect.db")) as database:
        assert database.execute("select count(*) from configuration").fetchone() == (0,)
        assert database.execute("select count(*) from block_type").fetchone() == (1,)
    assert prefect_server._read_made_by(tmp_path) == prefect_server._software()


@pytest.mark.parametrize("kind", ["garbage", "empty", "truncated", "foreign", "no block types"])
def test_damaged_template_is_thrown_away(tmp_path: Path, cache: Path, kind: str) -> None:
    make_database(template_path(), num_flow_runs=int(kind == "foreign"), num_block_types=int(kind != "no block types"))
    content = template_path().read_bytes()
    broken = {"garbage": b"not a database" * 100, "empty": b"", "truncated": content[: len(content) // 2]}
    template_path().write_bytes(broken.get(kind, content))
    prefect_server._copy_template(tmp_path)
    assert not template_path().exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make_database(tmp_path / "prefect.db")
    prefect_server._keep_template(tmp_path)
    assert not template_path().exists()


def test_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    process = start_process(
        [sys.executable, "-S", "-c", "import time; time.sleep(0.3); print('no such table')"],
        log=tmp_path / "server.log",
        folder=tmp_path,
        environment=os.environ,
        attached=False,
    )
    with pytest.raises(ServiceError, match=r"(?s)server\.log ends with:.*no such table"):
        prefect_server.wait_for_prefect_server(tmp_path, LocalPrefectApi(find_free_ports(1)[0]), process)


def test_environment_of_the_user_does_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "AWS_SECRET_ACCESS_KEY", "DFLASH_HOME"):
        monkeypatch.setenv(name, "of the user")
    monkeypatch.setenv("NO_PROXY", "example.org")
    env = process_environment(tmp_path, outside=False)
    assert "of the user" not in env.values()
    assert env["PREFECT_HOME"] == str(tmp_path)
    assert env["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert env["HTTPS_PROXY"].endswith(":9")
    assert "HTTPS_PROXY" not in process_environment(tmp_path).keys() - os.environ.keys()


def test_no_proxy_is_not_added_twice() -> None:
    assert fixed_environment({"NO_PROXY": "localhost,127.0.0.1"})["NO_PROXY"] == "localhost,127.0.0.1"


def test_profile_holds_the_settings_of_clients_and_server(tmp_path: Path) -> None:
    write_profile(LocalPrefectApi(4321), tmp_path)
    content = tomllib.loads((tmp_path / "profiles.toml").read_text())
    settings = content["profiles"][content["active"]]
    assert settings["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"
    assert settings["PREFECT_SERVER_UI_API_URL"] == "/api"
    assert settings["PREFECT_LOCAL_STORAGE_PATH"] == str(tmp_path.parent / "results")


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        known = {"/api/health": (200, b"false"), "/api/text": (200, b"<html>"), "/api/missing": (404, b"no such thing")}
        self._answer(*known.get(self.path, (503, b"busy")))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.server.num_posts += 1
        self._answer(*((503, b"busy") if self.server.num_posts <= 2 else (200, content)))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class _Server(HTTPServer):
    """Busy for GET, and for the first two POSTs, whose content the later ones give back."""

    num_posts = 0


@pytest.fixture
def fake_server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def fake_api(fake_server: _Server) -> LocalPrefectApi:
    return LocalPrefectApi(fake_server.server_port, busy_s=0.5)


def test_answers_that_are_no_success_are_errors(fake_api: LocalPrefectApi) -> None:
    assert not fake_api.is_healthy()
    with pytest.raises(ServiceError, match="status 404: b'no such thing'"):
        fake_api.get("/missing")
    with pytest.raises(ServiceError, match="JSON"):
        fake_api.get("/text")
    with pytest.raises(ServiceError, match="ended before"):
        fake_api.wait_until_healthy(5, is_running=lambda: False)
    with pytest.raises(ServiceError, match="within 0 s"):
        fake_api.wait_until_healthy(0.2, is_running=lambda: True)


def test_request_to_a_busy_server_is_repeated(fake_server: _Server, fake_api: LocalPrefectApi) -> None:
    assert fake_api.post("/flows", {"name": "probe"}) == {"name": "probe"}
    assert fake_server.num_posts == 3


def test_server_that_stays_busy_is_an_error(fake_api: LocalPrefectApi) -> None:
    started = time.monotonic()
    with pytest.raises(ServiceError, match="status 503: b'busy'"):
        fake_api.get("/other")
    assert 0.3 <= time.monotonic() - started < 60


def test_nobody_listening_is_an_error() -> None:
    with pytest.raises(ServiceError, match="ConnectionRefused"):
        LocalPrefectApi(find_free_ports(1)[0]).get("/health")
