"""Backing up, restoring, rolling back and collecting garbage by command and by flow, on a small dataset."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dflash.data.dataset import DatasetRoot
from dflash.data.verify import verify_dataset
from dflash.errors import DatasetError, UsageError
from flows.cli import main
from flows.cli_backup import backup_command, gc_command, restore_command, rollback_command
from tests.data.small_roots import Small, open_root
from tests.storage.faults import Faster, FaultStore

app = typer.Typer()
app.command("backup")(backup_command)
app.command("restore")(restore_command)
app.command("rollback")(rollback_command)
app.command("gc")(gc_command)


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def call_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(*arguments, "--json"))
    return found


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    """Version 1 with two shards, version 2 with one of them."""
    monkeypatch.chdir(tmp_path)
    made = Small(open_root(str(tmp_path / "train"), tmp_path), tmp_path / "work")
    made.merge(0, 10)
    made.drop_first_shard()
    return made


def wipe(small: Small) -> None:
    for uri in (small.root.uri, f"{small.root.uri}.meta"):
        shutil.rmtree(uri)


def test_commands_back_up_and_restore(small: Small, tmp_path: Path) -> None:
    uri, far = small.root.uri, str(tmp_path / "far")
    for version in ("1", "2"):
        record = call_json("backup", uri, "--backup", far, "--version", version)
    assert (record["target"], record["shards_kept"], record["shards_copied"]) == (far, 1, 0)
    assert "shards_kept" in call("backup", uri, "--backup", far, "--check")
    current = small.root.manifest()
    wipe(small)
    assert call_json("restore", uri, "--backup", far)["manifest"] == current.name
    assert verify_dataset(small.root, current).problems == ()
    assert call_json("rollback", uri, "--to", "1", "--backup", far)["num_rows"] == 6
    with pytest.raises(DatasetError, match="has no version 9"):
        call("rollback", uri, "--to", "9")
    with pytest.raises(UsageError, match="lies in the dataset"):
        call("backup", uri, "--backup", f"{uri}/x")


def test_garbage_is_shown_before_it_goes(small: Small) -> None:
    uri = small.root.uri
    small.put_shard(90)
    assert "0 objects (0 bytes) would be removed" in call("gc", uri, "--dry-run")
    shown = call("gc", uri, "--dry-run", "--min-age-hours", "0")
    assert "1 shards" in shown
    assert "would be moved" in shown
    planned = call_json("gc", uri, "--dry-run", "--min-age-hours", "0")
    done = call_json("gc", uri, "--min-age-hours", "0")
    assert [item["key"] for item in done["removed"]] == [item["key"] for item in planned["removed"]]
    assert (planned["dry_run"], done["dry_run"], len(done["moved"])) == (True, False, 1)
    assert len(small.root.store.list("shards")) == 1
    assert call_json("rollback", uri, "--to", "1")["num_shards"] == 2


def test_a_lost_race_is_exit_code_4(
    small: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = DatasetRoot.open

    def open_beside_another(uri: str, *arguments: Any) -> DatasetRoot:
        root = opened(uri, *arguments)
        store = FaultStore(root.store, Faster(lambda: small.merge(30)))
        return DatasetRoot(root.uri, store if uri == small.root.uri else root.store, root.meta, root.cache)

    monkeypatch.setattr(DatasetRoot, "open", open_beside_another)
    monkeypatch.setattr("sys.argv", ["dflash", "rollback", small.root.uri, "--to", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    assert "another publisher won" in capsys.readouterr().err
    assert small.root.manifest().version == 3


@pytest.mark.usefixtures("prefect_server", "home")
def test_flows_do_the_same(small: Small) -> None:
    from flows.backup_dataset import backup_dataset, collect_dataset_garbage, restore_dataset, rollback_dataset

    uri = small.root.uri
    assert backup_dataset(uri, version="1")["shards_copied"] == 2
    assert backup_dataset(uri)["shards_copied"] == 0
    assert len(collect_dataset_garbage(uri, min_age_hours=0)["moved"]) == 1
    assert len(small.root.store.list("shards")) == 2, "a flow only plans unless it is told otherwise"
    assert "put_back" in collect_dataset_garbage(uri, min_age_hours=0, dry_run=False)
    assert len(small.root.store.list("shards")) == 1
    assert rollback_dataset(uri, to="1")["num_rows"] == 6
    wipe(small)
    assert restore_dataset(uri, check=True)["shards_copied"] == 1
    assert verify_dataset(small.root, small.root.manifest(2)).problems == ()
