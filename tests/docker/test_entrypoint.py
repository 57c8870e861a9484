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


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "windows\r\n", "tab\t"])
def test_a_secret_that_is_none_is_refused_without_being_repeated(tmp_path: Path, content: str) -> None:
    (tmp_path / "secret").write_bytes(content.encode())
    result = enter(SHOW, PREFECT_API_AUTH_STRING_FILE=str(tmp_path / "secret"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "expected one line without control characters" in result.stderr
    assert not [word for word in ("lines", "windows", "tab") if word in result.stderr]


def test_a_folder_in_place_of_a_secret_is_named(tmp_path: Path) -> None:
    result = enter(SHOW, DFLASH_API_KEY_FILE=str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert f"DFLASH_API_KEY_FILE names {tmp_path}: expected a file" in result.stderr


def test_a_secret_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret with space").write_text("one")
    place = str(tmp_path / "secret with space")
    assert json.loads(enter(SHOW, DFLASH_API_KEY_FILE=place).stdout)["DFLASH_API_KEY"] == "one"
    result = enter(SHOW, DFLASH_API_KEY_FILE=place, DFLASH_API_KEY="other")
    assert result.returncode == 2
    assert "both DFLASH_API_KEY and DFLASH_API_KEY_FILE are set" in result.stderr
    assert "other" not in result.stderr


@pytest.fixture
def prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the program, which says that it was started."""
    program = tmp_path / "prefect"
    program.write_text("#!/bin/sh\necho started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return ["prefect", "server", "start"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "server", "127.example.org"])  # noqa: S104 - what is refused
def test_an_open_server_without_a_password_is_refused(prefect: list[str], tmp_path: Path, host: str) -> None:
    refused = enter(prefect, PREFECT_SERVER_API_HOST=host)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"would listen on {host} without a password" in refused.stderr
    assert enter([*prefect, "--host", host]).returncode == 2
    (tmp_path / "auth").write_text("admin:x")
    allowed = enter(prefect, PREFECT_SERVER_API_HOST=host, PREFECT_SERVER_API_AUTH_STRING_FILE=str(tmp_path / "auth"))
    assert allowed.stdout == "started\n"


@pytest.mark.parametrize("options", [["--no-prompt"], ["--profile", "open"]])
def test_options_before_the_command_hide_no_open_server(prefect: list[str], options: list[str]) -> None:
    program, *command = prefect
    result = enter([program, *options, *command], PREFECT_SERVER_API_HOST="0.0.0.0")  # noqa: S104 - what is refused
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", None])
def test_a_server_for_this_machine_alone_needs_none(prefect: list[str], host: str | None) -> None:
    environment = {} if host is None else {"PREFECT_SERVER_API_HOST": host}
    assert enter(prefect, **environment).stdout == "started\n"


def test_an_empty_host_is_every_address(prefect: list[str]) -> None:
    refused = enter(prefect, PREFECT_SERVER_API_HOST="")
    assert refused.returncode == 2
    assert "would listen on every address without a password" in refused.stderr


def test_a_key_that_would_break_the_stores_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "aws_secret_access_key").write_text('a"b')
    command = ["sh", str(DOCKER / "make_secrets.sh"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "aws_secret_access_key: expected letters, digits" in result.stderr
    assert not (tmp_path / "s3.json").exists()


def test_an_empty_secret_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "prefect_auth").touch(mode=0o444)
    subprocess.run(["sh", str(DOCKER / "make_secrets.sh"), str(tmp_path)], check=True)
    assert (tmp_path / "prefect_auth").read_text().startswith("admin:")


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
