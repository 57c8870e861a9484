from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash.train.curves import MetricsTail, read_metrics
from dflash.train.preflight import drafter_config
from dflash.train.run import TrainRun
from dflash.train.target_shape import TargetNumbers
from flows.cli import app
from flows.parameters import load_parameters
from tests.flows.server import wait_for
from tests.train.tiny_run import publish_rows, tiny_run, write_target

RUNS = Path(__file__).parents[2] / "deployments" / "runs"
SMALL = TargetNumbers(
    num_parameters=134_515_008,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49_152,
    max_position_embeddings=8192,
    rope_theta=1e5,
    eos_token_id=2,
)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """`dflash train` on a tiny run without an end."""
    publish_rows(str(tmp_path / "data"), tmp_path / "made")
    values = tiny_run(str(tmp_path / "data"), write_target(tmp_path / "target"), str(tmp_path / "run"))
    train = values.pop("train") | {"num_epochs": 100_000, "checkpoint_every": 100_000}
    drafter = train.pop("drafter")
    tables = [("", values), ("[train]\n", train), ("[train.drafter]\n", drafter)]
    lines = [
        title + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items()) for title, table in tables
    ]
    (tmp_path / "run.toml").write_text("".join(lines))
    program = "import flows.cli; flows.cli.main()"
    return [sys.executable, "-c", program, "train", "--config", str(tmp_path / "run.toml"), "--json"]


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_sigterm_saves_with_exit_code_0_and_the_same_command_goes_on(command: list[str], tmp_path: Path) -> None:
    process = start(command, tmp_path)
    wait_for(MetricsTail(tmp_path / "run").newest, 300)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    stopped: dict[str, Any] = json.loads(out)
    assert (stopped["status"], stopped["step"] > 0) == ("stopped", True)
    assert f"stopped at step {stopped['step']}" in err

    last = stopped["step"] + 3
    process = start([*command, "--set", f"train.max_steps={last}"], tmp_path)
    out, err = process.communicate(timeout=300)
    done = json.loads(out)
    assert (done["status"], done["step"], done["data"]["version"]) == ("finished", last, 1), err
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, last + 1))


def test_bad_parameters_end_with_code_2(command: list[str], tmp_path: Path) -> None:
    process = start([*command, "--set", "train.pack_token=5"], tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "train.pack_token" in err


def test_a_changed_environment_is_accepted_by_its_own_option(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TrainRun] = []

    def record(run: TrainRun, _show: Any) -> dict[str, Any]:
        asked.append(run)
        return {"status": "finished"}

    monkeypatch.setattr("flows.cli_train._train_here", record)
    command = ["train", "--dataset", "d", "--output", "o", "--set", "target=t"]
    for arguments in (command, [*command, "--accept-env-change"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert [run.train.accept_env_change for run in asked] == [False, True]


@pytest.mark.parametrize("recipe", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_a_run_for_any_dataset(recipe: Path) -> None:
    run = load_parameters(TrainRun, recipe, [], {"dataset": "d", "output": "o", "target": "t"})
    network = drafter_config(run.train, run.target_shape or SMALL)
    assert (run.dataset, network.block_size) == ("d", run.train.drafter.block_size)
