"""The database of the stack: private, found again, repaired after a kill, and refused with a reason."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dflash.errors import ServiceError, UsageError
from embedded import postgres
from embedded.postgres import PostgresCluster, check_can_pass, check_socket_path, find_programs
from tests.embedded.postgres_folder import reachable_folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with reachable_folder() as folder:
        made = PostgresCluster(folder / "postgres")
        made.start()
        try:
            yield made
        finally:
            made.stop()
            assert made.process() is None


def query(cluster: PostgresCluster, sql: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["psql", "-XAt", "-h", str(cluster.directory), "-U", "prefect", "-c", sql, "postgres"]
    return subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, check=False)


def test_it_opens_no_port_and_lets_in_its_owner_alone(cluster: PostgresCluster) -> None:
    process = cluster.process()
    assert process is not None
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) > 3
    assert [member.net_connections("inet") for member in family if member.is_running()] == [[]] * len(family)
    assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o700
    assert all(member.uids().real != 0 for member in family)
    assert query(cluster, "select current_user").stdout == "prefect\n"
    assert "password" not in cluster.url
    if os.geteuid() == 0:
        above = cluster.directory.parent.stat()
        assert (stat.S_IMODE(above.st_mode), above.st_gid) == (0o710, pwd.getpwnam("postgres").pw_gid)
        cluster.directory.parent.chmod(0o711)
        cluster.directory.chmod(0o711)
        try:
            refused = query(cluster, "select 1", user="nobody")
        finally:
            cluster.directory.chmod(0o700)
            cluster.directory.parent.chmod(0o710)
        assert refused.returncode != 0
        assert "ermission denied" in refused.stderr  # the socket's own mode


def test_a_second_start_leaves_it_as_it_is(cluster: PostgresCluster) -> None:
    before = cluster.process()
    cluster.start()
    assert PostgresCluster(cluster.directory).process() == before


def test_a_killed_server_is_started_again_with_its_rows(cluster: PostgresCluster) -> None:
    query(cluster, "create table kept as select 1 as one")
    killed = cluster.process()
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    while killed.is_running:
        time.sleep(0.01)
    assert not cluster.answers()
    cluster.start()
    assert cluster.process() not in {None, killed}
    assert query(cluster, "select one from kept").stdout == "1\n"


def test_a_killed_servers_id_may_be_another_programs_by_now(cluster: PostgresCluster) -> None:
    killed = cluster.process()
    assert killed is not None
    family = psutil.Process(killed.pid).children(recursive=True)
    os.kill(killed.pid, signal.SIGKILL)
    psutil.wait_procs(family, timeout=30)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(killed.pid, 0)
    user = postgres.SYSTEM_USER if os.geteuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=user) as other:
        try:
            for lock in (cluster.directory / "data" / "postmaster.pid", cluster.directory / ".s.PGSQL.5432.lock"):
                lock.write_text(f"{other.pid}\n" + lock.read_text().partition("\n")[2])
            cluster.start()
            assert other.poll() is None
        finally:
            other.kill()
    assert query(cluster, "select 1").stdout == "1\n"


@pytest.mark.parametrize("version", [None, "", "half", "\udcff"])
def test_a_damaged_cluster_is_named_and_kept(tmp_path: Path, version: str | None) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "base").write_text("rows")
    if version is not None:
        (data / "PG_VERSION").write_bytes(version.encode(errors="surrogateescape"))
    with pytest.raises(ServiceError, match="data is damaged: expected a number in PG_VERSION"):
        PostgresCluster(tmp_path).start()
    assert (data / "base").read_text() == "rows"


def test_an_initialisation_that_was_killed_is_begun_anew(cluster: PostgresCluster) -> None:
    other = PostgresCluster(cluster.directory.with_name("other"))
    other.directory.mkdir(mode=0o700)
    (other.directory / "data.part").mkdir()
    (other.directory / "data.part" / "PG_VERSION").write_text("half")
    other.start()
    assert other.stop()
    assert not other.stop()
    assert not (other.directory / "data.part").exists()


def test_what_is_no_running_server_is_not_taken_for_one(tmp_path: Path) -> None:
    cluster = PostgresCluster(tmp_path)
    (tmp_path / "data").mkdir()
    for content in ("", "x", "-1", str(os.getpid()), "999999999"):
        (tmp_path / "data" / "postmaster.pid").write_text(content)
        assert cluster.process() is None
    assert not cluster.answers()


def test_missing_programs_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgres.BINARIES_VARIABLE, str(tmp_path))
    with pytest.raises(ServiceError, match=r"apt-get install postgresql.*DFLASH_POSTGRES_BIN"):
        PostgresCluster(tmp_path / "postgres").start()
    assert not (tmp_path / "postgres").exists()


def test_programs_of_another_version_than_the_cluster_are_refused() -> None:
    with pytest.raises(ServiceError, match=r"PostgreSQL 9, of which the cluster is, is not installed"):
        find_programs("9")


def test_programs_are_found_on_the_path_and_by_the_variable(
    cluster: PostgresCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_programs()
    monkeypatch.setattr(postgres, "_DEBIAN", Path("/nowhere"))
    monkeypatch.setenv("PATH", str(folder))
    assert find_programs() == folder
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServiceError, match="is not installed"):
        find_programs()
    monkeypatch.setenv(postgres.BINARIES_VARIABLE, str(folder))
    assert find_programs() == folder


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    check_socket_path(Path("/" + "x" * 92))
    with pytest.raises(UsageError, match="found 108"):
        check_socket_path(Path("/" + "x" * 93))


def test_a_folder_that_the_servers_user_cannot_pass_is_named(tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    (tmp_path / "open").mkdir(mode=0o711)
    tmp_path.chmod(0o700)
    with pytest.raises(UsageError, match=rf"{tmp_path}: PostgreSQL never runs as root, so it runs as nobody"):
        check_can_pass(tmp_path / "open", nobody)
    check_can_pass(Path("/usr/bin"), nobody)
