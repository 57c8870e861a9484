"""The entry point of the images: secrets from files, no open server without a password."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SHOW = ["python3", "-S", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]


def enter(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", DOCKER / "entrypoint.sh", *command],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_secret_comes_from_its_file_and_into_no_argument(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('it\'s "$HOME" `x`\n')
    result = enter(SHOW, AWS_SECRET_ACCESS_KEY_FILE=str(tmp_path / "secret"), OTHER_FILE="kept")
    found = json.loads(result.stdout)
    assert found["AWS_SECRET_ACCESS_KEY"] == 'it\'s "$HOME" `x`'
    assert "AWS_SECRET_ACCESS_KEY_FILE" not in found
    assert found["OTHER_FILE"] == "kept"
    assert result.stderr == ""


def test_a_secret_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    result = enter(SHOW, PREFECT_API_AUTH_STRING_FILE=str(tmp_path / "missing"))
    assert result.returncode == 2
    assert f"PREFECT_API_AUTH_STRING_FILE names {tmp_path / 'missing'}" in result.stderr
    assert result.stdout == ""


@pytest.fixture
def prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the program, which says that it was started."""
    program = tmp_path / "prefect"
    program.write_text("#!/bin/sh\necho started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return ["prefect", "server", "start"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "server"])  # noqa: S104 - what is refused
def test_an_open_server_without_a_password_is_refused(prefect: list[str], tmp_path: Path, host: str) -> None:
    refused = enter(prefect, PREFECT_SERVER_API_HOST=host)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"would listen on {host} without a password" in refused.stderr
    assert enter([*prefect, "--host", host]).returncode == 2
    (tmp_path / "auth").write_text("admin:x")
    allowed = enter(prefect, PREFECT_SERVER_API_HOST=host, PREFECT_SERVER_API_AUTH_STRING_FILE=str(tmp_path / "auth"))
    assert allowed.stdout == "started\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", None])
def test_a_server_for_this_machine_alone_needs_none(prefect: list[str], host: str | None) -> None:
    environment = {} if host is None else {"PREFECT_SERVER_API_HOST": host}
    assert enter(prefect, **environment).stdout == "started\n"


def test_secrets_are_made_once_in_a_closed_folder(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    command = ["sh", str(DOCKER / "make_secrets.sh"), str(folder)]
    subprocess.run(command, check=True)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    subprocess.run(command, check=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(first["postgres_password"]) == 48
    assert first["prefect_auth"].startswith("admin:")
    (identity,) = json.loads(first["s3.json"])["identities"]
    assert identity["credentials"] == [
        {"accessKey": first["aws_access_key_id"], "secretKey": first["aws_secret_access_key"]}
    ]
    assert len({*first.values()}) == len(first)
