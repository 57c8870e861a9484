"""PostgreSQL for the Prefect server: the system's programs, a cluster of the stack's own, one private unix socket.

No port is opened and no password exists: the kernel tells the server who connects (`peer`), and only the user who owns
the stack is let in. PostgreSQL refuses to run as root, so root's cluster belongs to the user `postgres`, which Debian's
package makes.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dflash.errors import ServiceError, UsageError
from embedded.processes import ProcessIdentity, identify_process, start_process, stop_process, tail

BINARIES_VARIABLE = "DFLASH_POSTGRES_BIN"
"""Environment variable that names the folder of `postgres` and `initdb` where they lie elsewhere."""

DATABASE_USER: Final = "prefect"
SYSTEM_USER: Final = "postgres"
START_TIMEOUT_S: Final = 60.0

_DEBIAN = Path("/usr/lib/postgresql")
_PROGRAMS = ("initdb", "pg_isready", "postgres")
_SOCKET_NAME = ".s.PGSQL.5432"
_NO_PROCESS = 2**31 - 1  # more than Linux gives out
_LONGEST_SOCKET_BYTES = 107  # sun_path of unix(7), less its closing zero


@dataclass(frozen=True, slots=True)
class PostgresCluster:
    """The database of one stack.

    Attributes:
        directory: holds `data/`, the socket and `postgres.log`.
    """

    directory: Path

    @property
    def url(self) -> str:
        """Address for SQLAlchemy; holds no secret."""
        return f"postgresql+asyncpg://{DATABASE_USER}@/postgres?host={self.directory}"

    @property
    def made_by(self) -> Path:
        """File that names the software whose tables the database holds."""
        return self.directory / "database-made-by"

    def process(self) -> ProcessIdentity | None:
        """The running server of this very cluster, known by the lock file that it keeps."""
        pid = _first_line(self._lock)
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        # The id of a killed one may be another program's by now.
        return identify_process(pid) if pid and os.fsencode(self._data) in command else None

    def answers(self) -> bool:
        """Whether it takes connections now."""
        return self.process() is not None and self._accepts()

    def start(self) -> None:
        """Make the cluster if there is none, and start its server unless it runs; returns when it takes connections.

        Raises:
            UsageError: the folder can't hold a cluster.
            ServiceError: PostgreSQL is missing or of another version, or did not start.
        """
        check_socket_path(self.directory)
        find_programs(self._version())
        self._make_private_folder()
        if self._version() is None:
            self._initialise()
        deadline = time.monotonic() + START_TIMEOUT_S
        started: ProcessIdentity | None = None
        while not self.answers():
            if self.process() is None and (started is None or not started.is_running):
                # After a kill the old one's children hold its memory for a moment: then a start is refused.
                started = self._launch()
            if time.monotonic() > deadline:
                log = self.directory / "postgres.log"
                raise ServiceError(f"PostgreSQL in {self.directory} did not start; {log} ends with:\n{tail(log)}")
            time.sleep(0.2)

    def stop(self) -> bool:
        """Stop the server, ending its connections; the data stays. Returns whether it ran."""
        process = self.process()
        if process is not None:
            stop_process(process, timeout_s=30.0, ask=signal.SIGINT)  # SIGTERM would wait for clients
        return process is not None

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _lock(self) -> Path:
        """Names the server's process, and outlives a killed one."""
        return self._data / "postmaster.pid"

    def _version(self) -> str | None:
        """Major version of the cluster, None where there is none.

        Raises:
            ServiceError: there is one that lacks its version, or names none.
        """
        path = self._data / "PG_VERSION"
        if not self._data.exists():
            return None
        version = path.read_text(errors="replace").strip() if path.is_file() else "nothing"
        if not version.isdecimal():
            raise ServiceError(
                f"{self._data} is damaged: expected a number in PG_VERSION, found {version[:20]!r}. Put the folder "
                "back from a copy, or move it away and run `dflash up --postgres` again: the history of runs is then a "
                "new one, and datasets are not touched."
            )
        return version

    def _make_private_folder(self) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        if (user := _server_user()) is not None:
            # The stack's folder stays closed to all others, but the server's user has to get through it.
            os.chown(self.directory.parent, -1, user.pw_gid)
            self.directory.parent.chmod(0o710)
            check_can_pass(self.directory.parent, user)
            os.chown(self.directory, user.pw_uid, user.pw_gid)

    def _initialise(self) -> None:
        """Make the cluster beside its place and move it there, so that it is whole or absent."""
        part = self.directory / "data.part"
        shutil.rmtree(part, ignore_errors=True)
        # A missing locale would be an error and another one another sort order: C is everywhere the same.
        options = ["--encoding=UTF8", "--locale=C", "--data-checksums", "--auth-local=peer", "--auth-host=reject"]
        result = self._run("initdb", f"--pgdata={part}", f"--username={DATABASE_USER}", *options)
        if result.returncode:
            raise ServiceError(f"initdb in {self.directory} failed: {result.stdout.decode(errors='replace')[-2000:]}")
        (part / "pg_hba.conf").write_text(f"local all {DATABASE_USER} peer map=stack\n")
        # The owner of the stack, and whom the server runs as, who could do everything anyway and asks for its health.
        accounts = {pwd.getpwuid(os.geteuid()).pw_name} | ({SYSTEM_USER} if _server_user() else set())
        lines = [f'stack "{account}" {DATABASE_USER}\n' for account in sorted(accounts)]
        (part / "pg_ident.conf").write_text("".join(lines))
        part.rename(self._data)

    def _disown(self, lock: Path) -> None:
        """Let a lock file of a killed server name no process, if its id is another program's since a reboot.

        PostgreSQL would wait for that one to end. The other lines stay: by them it sees whether children of the killed
        server still use the data.
        """
        pid = _first_line(lock)
        if pid is not None and _name_of(pid) not in {None, "postgres", "postmaster"}:
            lock.write_text(f"{_NO_PROCESS}\n{lock.read_text().partition(chr(10))[2]}")

    def _launch(self) -> ProcessIdentity:
        killed = _first_line(self._lock)
        if killed is not None:
            with contextlib.suppress(ChildProcessError):  # not ours: whoever started it collects it
                os.waitpid(killed, os.WNOHANG)  # else the new server takes it for a living one
        for lock in (self._lock, self.directory / f"{_SOCKET_NAME}.lock"):
            self._disown(lock)
        user = _server_user()
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.directory),
            "unix_socket_permissions": "0700",
            "logging_collector": "off",
        }
        return start_process(
            [
                self._program("postgres"),
                "-D",
                str(self._data),
                *(f"--{key}={value}" for key, value in settings.items()),
            ],
            log=self.directory / "postgres.log",
            folder=self.directory,
            environment=_environment(),
            attached=False,
            user=None if user is None else user.pw_name,
        )

    def _accepts(self) -> bool:
        connection = ["--host", str(self.directory), "--username", DATABASE_USER, "--dbname", "postgres"]
        return self._run("pg_isready", "--quiet", *connection).returncode == 0

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        user = _server_user()
        return subprocess.run(
            [self._program(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=_environment(),
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
            check=False,
        )

    def _program(self, name: str) -> str:
        return str(find_programs(self._version()) / name)


def find_programs(version: str | None = None) -> Path:
    """The folder of PostgreSQL's server programs.

    Args:
        version: major version that the cluster needs; the newest by default.

    Raises:
        ServiceError: there is none; says what to install.
    """
    given = os.environ.get(BINARIES_VARIABLE)
    if given is not None:
        folders = [Path(given)]
    else:
        folders = sorted(_DEBIAN.glob("*/bin"), key=lambda folder: _number(folder.parent.name), reverse=True)
        if (on_path := shutil.which("postgres")) is not None:
            folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if all(os.access(folder / name, os.X_OK) for name in _PROGRAMS) and version in {None, _major_of(folder)}:
            return folder
    wanted = "PostgreSQL" if version is None else f"PostgreSQL {version}, of which the cluster is,"
    raise ServiceError(
        f"{wanted} is not installed: looked for {', '.join(_PROGRAMS)} in {', '.join(map(str, folders)) or _DEBIAN}. "
        f"Install it (Debian: `apt-get install postgresql{f'-{version}' if version else ''}`) or name the folder of "
        f"its programs in {BINARIES_VARIABLE}; without `--postgres` Prefect runs on SQLite."
    )


def check_socket_path(directory: Path) -> None:
    """Refuse a folder in which no socket can lie.

    Raises:
        UsageError: its path is longer than the kernel takes.
    """
    length = len(os.fsencode(directory / _SOCKET_NAME))
    if length > _LONGEST_SOCKET_BYTES:
        raise UsageError(
            f"{directory / _SOCKET_NAME}: expected a path of at most {_LONGEST_SOCKET_BYTES} bytes for a unix socket, "
            f"found {length}; use a project folder with a shorter path"
        )


def check_can_pass(folder: Path, user: pwd.struct_passwd) -> None:
    """Refuse a folder that another user can't reach.

    Raises:
        UsageError: names the folder on the way that is closed.
    """
    for place in (folder, *folder.parents):
        found = place.stat()
        needed = 0o100 if found.st_uid == user.pw_uid else 0o010 if found.st_gid == user.pw_gid else 0o001
        if not found.st_mode & needed:
            raise UsageError(
                f"{place}: PostgreSQL never runs as root, so it runs as {user.pw_name}, who can't pass this folder "
                f"(mode {found.st_mode & 0o777:o}). Run `dflash up` as a user other than root, or in a project folder "
                f"that {user.pw_name} can reach, such as one below /srv."
            )


def _server_user() -> pwd.struct_passwd | None:
    """Whom the server runs as, None for this process's own user.

    Raises:
        ServiceError: this process is root's and the machine has no user for PostgreSQL.
    """
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError as error:
        raise ServiceError(
            f"PostgreSQL never runs as root, and this machine has no user {SYSTEM_USER} to run it as: run `dflash up` "
            f"as another user, or add one with `useradd --system {SYSTEM_USER}`"
        ) from error


def _first_line(lock: Path) -> int | None:
    """Process id in a lock file."""
    try:
        pid = int(lock.read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None
    return pid if pid > 0 else None


def _name_of(pid: int) -> str | None:
    """What a process calls its program, None where there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def _environment() -> dict[str, str]:
    """A bare environment: the programs take settings from PG* variables and from files in HOME."""
    return {"PATH": os.defpath, "LC_ALL": "C", "HOME": "/"}


def _major_of(folder: Path) -> str:
    result = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False)
    words = result.stdout.split()
    return words[2].split(".")[0] if len(words) > 2 else ""


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0
