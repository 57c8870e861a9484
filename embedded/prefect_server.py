"""A Prefect server on SQLite or PostgreSQL, loopback only, that starts in seconds.

A new database takes about 15 of the 24 s of a first start: 100 migrations and 54 block types. So the first one is kept
as a template in the user's cache, and a later start copies it and skips both (7.5 s). On PostgreSQL the first start
pays, and later ones skip both.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dflash.errors import ServiceError
from embedded.marked import MARKER, find_marked, stop_all
from embedded.postgres import PostgresCluster
from embedded.prefect_api import LocalPrefectApi
from embedded.prefect_settings import activate_settings, check_path, process_environment, write_profile
from embedded.processes import ProcessIdentity, find_free_ports, start_process, tail

START_TIMEOUT_S = 180
"""Longest wait for a server; a loaded two-core machine needs up to 70 s for a new database."""

_FOLDER_PREFIX = "dflash-prefect-"
_SKIP_DATABASE_SET_UP = {
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


def server_command() -> list[str]:
    """The command line of the server; address and port are in its profile."""
    return [sys.executable, "-P", "-m", "prefect", "server", "start"]


def start_prefect_server(
    home: Path,
    api: LocalPrefectApi,
    marker: str,
    *,
    database: PostgresCluster | None = None,
    attached: bool = False,
) -> ProcessIdentity:
    """Start a server; doesn't wait for it. An SQLite database is made from the template where there is none.

    Args:
        home: PREFECT_HOME, made with mode 0700; holds profile, SQLite database and `server.log`.
        api: address to serve.
        marker: by which the process is found again.
        database: the running database to use instead of SQLite.
        attached: whether it dies with this process; only from the main thread.

    Raises:
        UsageError: the path of `home` can't be used.
        ServiceError: the process did not start.
    """
    check_path(home)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_profile(api, home, None if database is None else database.url)
    if database is None and not (home / "prefect.db").exists():
        _copy_template(home)
    env = process_environment(home, outside=False) | {MARKER: marker}
    if _read_made_by(home, database) == _software():
        env |= _SKIP_DATABASE_SET_UP
    return start_process(server_command(), log=home / "server.log", folder=home, environment=env, attached=attached)


def wait_for_prefect_server(
    home: Path, api: LocalPrefectApi, process: ProcessIdentity, database: PostgresCluster | None = None
) -> None:
    """Wait until a started server answers; then remember what made its database, and keep a template of it.

    Raises:
        ServiceError: it ended or did not answer in `START_TIMEOUT_S`; the message has the end of its log.
    """
    try:
        api.wait_until_healthy(START_TIMEOUT_S, is_running=lambda: process.is_running)
    except ServiceError as error:
        raise ServiceError(f"{error}; its log {home / 'server.log'} ends with:\n{tail(home / 'server.log')}") from error
    if _read_made_by(home, database) != _software():
        _made_by(home, database).write_text(_software())
    if database is None and not template_path().exists():
        _keep_template(home)


@contextlib.contextmanager
def temporary_prefect_server() -> Iterator[LocalPrefectApi]:
    """Serve one run where no stack is up: a server in a temporary folder that this process uses, ended at exit.

    It dies with this process however that ends, so it is started from the main thread only.

    Raises:
        ServiceError: the server did not start, or this is another thread.
    """
    with _temporary_folder() as folder, _restored_environment():
        home, api = folder / "prefect", LocalPrefectApi(find_free_ports(1)[0])
        try:
            process = start_prefect_server(home, api, marker=str(folder), attached=True)
            wait_for_prefect_server(home, api, process)
            activate_settings(api, home)
            try:
                yield api
            finally:
                _send_pending_logs()
        finally:
            stop_all(find_marked(str(folder)), grace_s=5)


def template_path() -> Path:
    """Where the prepared database lies: one for each combination of versions that decides its content."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dflash" / f"{_software()}.db"


def _software() -> str:
    """Names what decides schema and block types of a new database."""
    versions = []
    for package in ("prefect", "prefect-aws"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package}-{version(package)}")
    return "_".join(versions)


def _made_by(home: Path, database: PostgresCluster | None) -> Path:
    return home / "database-made-by" if database is None else database.made_by


def _read_made_by(home: Path, database: PostgresCluster | None = None) -> str:
    path = _made_by(home, database)
    return path.read_text() if path.exists() and (database is not None or (home / "prefect.db").exists()) else ""


def _copy_template(home: Path) -> None:
    """Put the template where the database goes, if there is a sound one; else the server makes its own."""
    if not template_path().exists():
        return
    part = home / "prefect.db.part"
    part.unlink(missing_ok=True)
    try:
        _copy_database(template_path(), part)
    except (sqlite3.Error, OSError):
        template_path().unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        return
    (home / "database-made-by").write_text(_software())
    part.replace(home / "prefect.db")


def _keep_template(home: Path) -> None:
    """Keep a copy of a new database, before anything was stored in it; a cache that can't be written is no error."""
    part = template_path().with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError, sqlite3.Error):
        part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _copy_database(home / "prefect.db", part)
            part.replace(template_path())
        finally:
            part.unlink(missing_ok=True)


def _copy_database(source: Path, target: Path) -> None:
    """Copy an SQLite file through SQLite itself, so that its write-ahead log comes along.

    Raises:
        sqlite3.Error: the copy is damaged, has no schema, or holds anything but schema and block types.
    """
    target.touch(mode=0o600)
    with (
        contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as reader,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        reader.backup(copy)
        copy.execute("pragma journal_mode = delete")
        # What belongs to one server stays out: nothing secret, nothing of its history.
        for table in ("configuration", "events", "event_resources"):
            copy.execute(f"delete from {table}")  # noqa: S608 - constants of this function
        copy.commit()
        (check,) = copy.execute("pragma quick_check").fetchone()
        counts = [copy.execute(f"select count(*) from {table}").fetchone()[0] for table in _TEMPLATE_TABLES]  # noqa: S608
        foreign = [copy.execute(f"select count(*) from {table}").fetchone()[0] for table in _EMPTY_TABLES]  # noqa: S608
    if check != "ok" or 0 in counts or any(foreign):
        raise sqlite3.DatabaseError(f"{source} is no database as a server makes it: {check}, {counts}, {foreign}")


_TEMPLATE_TABLES = ("alembic_version", "block_type", "block_schema")
_EMPTY_TABLES = ("block_document", "flow_run", "deployment", "work_pool")


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder that goes with this process; what a killed one left is removed by the next.

    The kernel frees the lock of a killed process. The locked file gets its name at last, so that nobody takes a folder
    for abandoned whose owner is about to lock it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as name:
        folder = Path(name).resolve()
        lock = os.open(folder / "in-use.part", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "in-use.part").rename(folder / "in-use")
            yield folder
        finally:
            os.close(lock)


def _is_abandoned(folder: Path) -> bool:
    """Whether a folder is ours and nobody holds its lock any more."""
    try:
        lock = os.open(folder / "in-use", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False
    finally:
        os.close(lock)


def _send_pending_logs() -> None:
    """Let the run's last log records reach the server: Prefect sends them in batches, every two seconds."""
    if "prefect.logging.handlers" in sys.modules:
        from prefect.logging.handlers import APILogHandler

        APILogHandler().flush()


@contextlib.contextmanager
def _restored_environment() -> Iterator[None]:
    """Undo what `activate_settings` did to this process."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update(before)
        if "prefect.context" in sys.modules:
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()
