"""`dflash plan` and `dflash doctor`: the known numbers, what is advised, and what stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dflash.errors import MemoryPlanError, TrainingError, UsageError
from dflash.train import environment
from dflash.train.checkpoint import CheckpointFolder, Snapshot
from dflash.train.plan import Amount, PlanRun, advice, plan_run, plan_table
from dflash.train.run import TrainRun
from flows.cli_plan import doctor_command, plan_command
from flows.parameters import load_parameters
from tests.eval.small_run import write_target

RECIPE = Path(__file__).parents[2] / "deployments" / "runs" / "qwen3.6-27b.toml"
app = typer.Typer()
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_production_recipe_is_a_run_and_gives_the_known_numbers() -> None:
    run = load_parameters(TrainRun, RECIPE, [], {})
    train = run.train
    assert (train.num_anchors, train.drafter.block_size, train.drafter.sliding_window) == (512, 16, 2048)
    assert (train.optimizer.learning_rate, train.optimizer.warmup_share, train.optimizer.clip_norm) == (6e-4, 0.04, 1.0)
    assert (train.num_epochs, train.loss.options(16).gamma) == (6, 7.0)
    plan = json.loads(call("plan", "--config", str(RECIPE), "--device-gb", "141", "--json"))
    assert plan["num_parameters"] / 1e9 == pytest.approx(1.730, abs=5e-4)
    assert plan["training_bytes"] / 1e9 == pytest.approx(27.7, abs=0.05)
    assert plan["frozen_bytes"] / 1e9 == pytest.approx(5.1, abs=0.05)
    assert plan["storage"]["bytes_per_token"] == 51_200
    assert plan["storage"]["offline_bytes"] / 1e12 == pytest.approx(90, rel=0.05)
    assert plan["fits"] is True
    assert plan["advice"] == []
    shown = call("plan", "--config", str(RECIPE), "--set", "tokens_per_s=20000")
    for part in ("1.730 B", "27.68 GB", "51.2 KB", "92.4 TB", "150.3 h", "backward pass"):
        assert part in shown


@pytest.mark.parametrize("device_gb", ["0", "-5", "nan", "inf"])
def test_a_device_without_a_size_is_refused(device_gb: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--config", str(RECIPE), "--device-gb", device_gb])
    assert isinstance(result.exception, UsageError)
    assert f"--device-gb {device_gb}:" in str(result.exception)
    assert CliRunner().invoke(app, ["plan", "--config", str(RECIPE), "--tokens", "inf"]).exit_code == 2


def test_a_recipe_that_does_not_fit_says_what_to_change_and_fails() -> None:
    arguments = ["plan", "--config", str(RECIPE), "--device-gb"]
    result = CliRunner().invoke(app, [*arguments, "80"])
    assert isinstance(result.exception, MemoryPlanError)
    assert "sharding replicate -> fsdp saves 18.2 GB and fits" in result.stdout
    assert "TOO SMALL" in result.stdout
    alone = CliRunner().invoke(app, [*arguments, "78", "--set", "num_processes=1", "--json"])
    found = json.loads(alone.stdout)
    assert found["fits"] is False
    assert any("num_processes and sharding 1 replicate -> 8 fsdp" in line for line in found["advice"])
    tight = load_parameters(PlanRun, RECIPE, [], {})
    plan = plan_run(tight, Amount(1000, 100), 70_000_000_000)
    assert "together these save" in " ".join(advice(plan))
    assert sum(one.saved_bytes for one in plan.together) >= plan.memory.total_bytes - 70_000_000_000
    hopeless = plan_run(tight, Amount(1000, 100), 10_000_000_000)
    assert "not enough" in advice(hopeless)[-1]


def test_a_plan_reads_the_targets_own_configuration(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    values: dict[str, Any] = {
        "target": str(tmp_path / "target"),
        "train": {"drafter": {"target_layer_ids": [0, 2], "mask_token_id": 310}, "max_seconds": 60},
    }
    plan = plan_run(PlanRun.model_validate(values), Amount(10, 20), None)
    assert plan.memory.parts["target weights"] == 2 * sum(
        (320 * 32, 4 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32), 32)
    )
    assert plan.storage.bytes_per_token == 2 * 2 * 32
    with pytest.raises(UsageError, match="needs the target"):
        plan_run(PlanRun(), Amount(1, 1), None)


def save(run: Path, step: int, **changed: str) -> None:
    record = {"environment": environment.fingerprint() | changed}
    CheckpointFolder(run / "checkpoints").save(Snapshot(step, {}, {}, record))


def test_the_doctor_compares_with_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    save(run, 1, torch="1.0")
    save(run, 2)
    healthy = json.loads(call("doctor", "--run", str(run), "--json"))
    assert healthy["problems"] == []
    assert healthy["checkpoint"].endswith("step-00000002")
    assert "0 differences" in call("doctor", "--run", str(run))
    save(run, 3, torch="1.0", cuda="11.0")
    result = CliRunner().invoke(app, ["doctor", "--run", str(run)])
    assert isinstance(result.exception, TrainingError)
    assert str(result.exception).startswith("2 properties differ")
    assert "--accept-env-change" in str(result.exception)
    assert "11.0" in result.stdout
    with pytest.raises(UsageError, match="holds no checkpoint"):
        call("doctor", "--run", str(tmp_path / "nowhere"))


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_NEEDED", ("torch", "no_such_package"))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert isinstance(result.exception, TrainingError)
    assert json.loads(result.stdout)["missing"] == ["no_such_package"]


def test_kept_features_are_planned_beside_a_gpu_and_on_a_cpu(tmp_path: Path) -> None:
    write_target(tmp_path)
    train = {"drafter": {"mask_token_id": 1, "num_target_features": 1}, "replay": {"max_bytes": 3_000_000_000}}
    beside, on_cpu = (
        plan_run(
            PlanRun.model_validate({"target": str(tmp_path), "train": train, "device": name}), Amount(10, 20), None
        )
        for name in ("auto", "cpu")
    )
    assert (beside.host_bytes, beside.memory.parts["replay"]) == (3_000_000_000, 0)
    assert ("machine: features kept for replay", "3.00 GB") in plan_table(beside, Amount(10, 20))
    assert (on_cpu.host_bytes, on_cpu.memory.parts["replay"]) == (0, 3_000_000_000)
