"""The command as people call it: exit codes and messages of the installed script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DFLASH = Path(sys.executable).with_name("dflash")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DFLASH, *arguments], capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect"], 2, "Missing argument"),
        (["no-such-command"], 2, "No such command"),
        (["status"], 1, "no stack"),
        (["verify", "nowhere"], 1, "holds no published version"),
        (["tokenize", "--source", "a", "--set", "options.max_seq_len=x"], 2, "options.max_seq_len"),
        (["tokenize", "--set", "nonsense"], 2, "expected key=value"),
        (["tokenize", "--config", "missing.toml"], 2, "missing.toml"),
    ],
)
def test_exit_codes(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert message in result.stderr + result.stdout
    assert "Traceback" not in result.stderr
