"""The command as people call it: exit codes and messages of the installed script."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli import app

REPOSITORY = Path(__file__).resolve().parents[2]
UsageError: Any = typer.BadParameter.__base__  # of the click that typer carries inside itself, or of the other
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


def documented_commands() -> list[str]:
    """Every command line of the documents: in code blocks, and between backticks."""
    found: set[str] = set()
    for name in ("README.md", "docs/operations.md"):
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        joined = "\n".join(blocks).replace("\\\n", " ")
        found |= set(re.findall(r"^(?:\S*/)?(dflash [^\n#]+)", joined, re.MULTILINE))
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        found |= set(re.findall(r"`(dflash [^`]+)`", prose))
    return sorted(" ".join(command.split()) for command in found)


def parse(command: str) -> None:
    """Let the command line's own parser read it; what is in brackets is optional, and given here."""
    group: Any = typer.main.get_command(app)
    name, *arguments = shlex.split(re.sub(r"[\[\]]", "", command).removeprefix("dflash "))
    with group.make_context("dflash", [name], resilient_parsing=True) as context:
        found = group.get_command(context, name)
        assert found is not None, f"no command {name!r}"
        if arguments:  # the name alone is how prose speaks of a command
            found.make_context(name, arguments, parent=context)


def test_documents_quote_commands() -> None:
    assert len(documented_commands()) > 15


@pytest.mark.parametrize("command", documented_commands())
def test_quoted_command_lines_parse(command: str) -> None:
    parse(command)


@pytest.mark.parametrize("command", ["dflash tokenise --source a", "dflash verify A --no-such-option"])
def test_wrong_command_lines_do_not_parse(command: str) -> None:
    with pytest.raises((AssertionError, UsageError)):
        parse(command)


@pytest.mark.usefixtures("prefect_server")
def test_json_prints_one_object_on_stdout(
    write_batch: Callable[..., Path], tmp_path: Path, smollm2_tokenizer_dir: Path
) -> None:
    result = run(
        *("tokenize", "--source", str(write_batch()), "--dataset", "train", "--tokenizer", str(smollm2_tokenizer_dir)),
        *("--set", "num_workers=1", "--set", "gate.max_length_cut_share=1", "--json"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    printed: dict[str, Any] = json.loads(result.stdout)
    assert (printed["rows"], printed["version"], printed["dataset"]) == (60, 1, "train")
    assert "60" in result.stderr, "progress goes there"
