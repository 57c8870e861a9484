"""Settings of the embedded Prefect: one definition, written to a profile and handed to the processes.

A profile in the stack's own PREFECT_HOME holds them, so that `PREFECT_HOME=.dflash/prefect prefect ...` works from a
shell, and nothing that the user's own Prefect configuration says leaks in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dflash.errors import UsageError
from embedded.prefect_api import HOST, LocalPrefectApi

HEARTBEAT_S = 30
"""Seconds between heartbeats of a flow run: the least that Prefect takes, so that a dead run shows in two minutes."""

# Nothing listens on the discard port: requests of the server to the outside fail at once, and it uses the copies that
# it carries (it asks GitHub for its list of block and worker types otherwise).
_NO_OUTSIDE = f"http://{HOST}:9"


def client_settings(api: LocalPrefectApi, home: Path) -> dict[str, str]:
    """Settings of every process that talks to the server.

    Args:
        api: the server.
        home: PREFECT_HOME of the stack; results are kept in a folder beside it.
    """
    return {
        "PREFECT_API_URL": api.url,
        # A busy SQLite server answers 503, seldom 500; 2 + 4 + ... + 64 s also covers a restart of the server.
        "PREFECT_CLIENT_MAX_RETRIES": "6",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_LOCAL_STORAGE_PATH": str(home.parent / "results"),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "dflash,tasks",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
        "PREFECT_WORKER_QUERY_SECONDS": "3",
    }


def server_settings(api: LocalPrefectApi, home: Path, database_url: str | None = None) -> dict[str, str]:
    """Settings of the server process alone.

    Args:
        api: the address that it serves.
        home: PREFECT_HOME of the stack; holds the SQLite database.
        database_url: another database, without a secret in it.
    """
    return {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(api.port),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url or f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        # With the default of 1 the server falls behind a run of a thousand tasks and loses rows of it.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
        # Relative: with another port than 4200 the UI would else ask the wrong server.
        "PREFECT_SERVER_UI_API_URL": "/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }


def write_profile(api: LocalPrefectApi, home: Path, database_url: str | None = None) -> None:
    """Write the profile `dflash` into the stack's PREFECT_HOME."""
    settings = client_settings(api, home) | server_settings(api, home, database_url)
    lines = ['active = "dflash"', "", "[profiles.dflash]", *(f"{key} = '{value}'" for key, value in settings.items())]
    part = home / "profiles.toml.part"
    part.write_text("\n".join(lines) + "\n")
    part.replace(home / "profiles.toml")


def process_environment(home: Path, *, outside: bool = True) -> dict[str, str]:
    """Environment of a process of the stack: the user's, without what would point it at other servers, plus ours.

    Args:
        home: PREFECT_HOME of the stack; the rest comes from the profile there.
        outside: whether the process may reach other machines.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "DFLASH_", "AWS_"))}
    env |= fixed_environment(env) | {"PREFECT_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    if not outside:
        env |= {"HTTP_PROXY": _NO_OUTSIDE, "HTTPS_PROXY": _NO_OUTSIDE, "http_proxy": _NO_OUTSIDE}
        env |= {"https_proxy": _NO_OUTSIDE, "ALL_PROXY": _NO_OUTSIDE, "all_proxy": _NO_OUTSIDE}
    return env


def fixed_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What holds whatever the server: no telemetry, no proxy between this machine and itself."""
    hosts = [host for host in env.get("NO_PROXY", env.get("no_proxy", "")).split(",") if host]
    no_proxy = ",".join([*hosts, *(host for host in (HOST, "localhost") if host not in hosts)])
    return {"DO_NOT_TRACK": "1", "NO_PROXY": no_proxy, "no_proxy": no_proxy}


def activate_settings(api: LocalPrefectApi, home: Path) -> None:
    """Point this process at the server, whether or not Prefect was imported already."""
    os.environ.update(client_settings(api, home) | fixed_environment(os.environ) | {"PREFECT_HOME": str(home)})
    if "prefect.context" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def check_path(path: Path) -> None:
    """Refuse a folder whose name would break the profile or the database address.

    Raises:
        UsageError: a quote, a line break, or a character that means something in a database URL.
    """
    bad = sorted({char for char in str(path) if char in "'\"?#%\\" or ord(char) < 0x20})
    if bad:
        raise UsageError(f"{path}: the project folder can't be used by Prefect, its path has {bad}; rename the folder")
