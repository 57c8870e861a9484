"""The commands adopt, versions and diff on a small dataset; they need no Prefect server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from datasets import Dataset
from typer.testing import CliRunner

from dflash.data.dataset import DatasetRoot
from dflash.errors import DatasetError
from flows.cli_versions import adopt_command, diff_command, versions_command

app = typer.Typer()
app.command("adopt")(adopt_command)
app.command("versions")(versions_command)
app.command("diff")(diff_command)


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_tokenizer_dir: Path) -> str:
    """A dataset that was adopted, rolled back to itself: one version, named twice by the pointer."""
    monkeypatch.chdir(tmp_path)
    columns = {"input_ids": [[n, n + 1, n + 2] for n in range(8)], "loss_mask": [[0, 1, 1]] * 8}
    Dataset.from_dict(columns).save_to_disk(tmp_path / "old", num_shards=2)
    arguments = ("--dataset", str(tmp_path / "train"), "--tokenizer", str(smollm2_tokenizer_dir), "--json")
    result = json.loads(call("adopt", str(tmp_path / "old"), *arguments))
    assert (result["num_rows"], result["num_shards"], result["num_loss_tokens"]) == (8, 2, 16)
    return str(tmp_path / "train")


def test_versions_are_shown_and_given_as_json(root: str) -> None:
    opened = DatasetRoot.open(root)
    opened.publish(opened.manifest(), opened.pointer(), "rollback")
    assert "adopt" in call("versions", root)
    lines = json.loads(call("versions", root, "--json"))["versions"]
    assert [(line["version"], line["num_rows"], line["is_current"]) for line in lines] == [(1, 8, True)]


def test_a_diff_is_shown_and_given_as_json(root: str) -> None:
    shown = call("diff", "1", "1", "--dataset", root)
    assert "2 tokens and more" in shown
    assert "100.0%" in shown
    diff = json.loads(call("diff", "1", "1", "--dataset", root, "--json"))
    assert (diff["shared_shards"], diff["only_first"], diff["settings"]) == (2, 0, [])


def test_a_refusal_is_an_error_of_ours(root: str) -> None:
    with pytest.raises(DatasetError, match=r"no version 9"):
        call("diff", "1", "9", "--dataset", root)
