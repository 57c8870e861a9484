"""`dflash evaluate` and `export` as commands, and the flow, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dflash.errors import GateError, UsageError
from dflash.eval.config import DecodeConfig, EvaluateRun
from flows.cli_evaluate import evaluate_command, export_command
from tests.eval.small_run import SmallRun, write_prompts, write_target

app = typer.Typer()
app.command("evaluate")(evaluate_command)
app.command("export")(export_command)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    monkeypatch.chdir(tmp_path)
    run = SmallRun(tmp_path / "run", write_target(tmp_path / "target"), write_prompts(tmp_path / "prompts.jsonl"))
    run.save(1)
    return run


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands_measure_show_and_export(small: SmallRun, tmp_path: Path) -> None:
    evaluate = ["evaluate", "--checkpoint", str(small.folder), "--set", f"prompts={small.prompts}"]
    evaluate += ["--set", "decode.max_new_tokens=6"]
    found = json.loads(call(*evaluate, "--json"))
    assert found["num_identical"] == found["num_prompts"] == 3
    assert found["record"]["drafter"]["step"] == 1
    shown = call(*evaluate, "--show", "b")
    for part in ("prompt b (code)", "drafted", "3 of 3", "mean over verify rounds", "evaluation.json"):
        assert part in shown.replace("\n", " "), part
    assert "prompt a" in call(*evaluate, "--show-first")
    with pytest.raises(UsageError, match="no prompt with this id"):
        call(*evaluate, "--show", "z")
    with pytest.raises(GateError, match="min_tau is 3"):
        call(*evaluate, "--set", "min_tau=3.5")
    out = tmp_path / "out"
    exported = json.loads(
        call("export", "--checkpoint", str(small.folder), "--format", "vllm", "--output", str(out), "--json")
    )
    assert exported["tau"] == found["tau"]
    assert sorted(path.name for path in out.iterdir()) == sorted(exported["files"])


@pytest.mark.usefixtures("prefect_server", "home")
def test_the_flow_evaluates_and_gates(small: SmallRun) -> None:
    from flows.evaluate_drafter import evaluate_drafter

    run = EvaluateRun(
        checkpoint=str(small.folder), prompts=str(small.prompts), decode=DecodeConfig(max_new_tokens=4), limit=1
    )
    result = evaluate_drafter(run)
    assert result["step"] == 1
    assert Path(result["evaluation"]).is_file()
    with pytest.raises(GateError, match="min_tau"):
        evaluate_drafter(run.model_copy(update={"min_tau": 3.9}))
