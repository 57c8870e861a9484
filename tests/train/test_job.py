from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from dflash.data.copying import mark_of
from dflash.errors import (
    DatasetError,
    IncompatibleError,
    MemoryPlanError,
    ModelError,
    StorageError,
    TrainingError,
    UsageError,
)
from dflash.storage import join_uri, open_store
from dflash.train import job
from dflash.train.checkpoint import load
from dflash.train.checkpoint_record import read_record
from dflash.train.checkpoint_store import CheckpointStore
from dflash.train.curves import read_metrics
from dflash.train.job import Places, Watch, train_run
from dflash.train.output_lease import LEASE, OutputLease
from dflash.train.run import TrainRun
from dflash.train.run_lock import hold_folder
from tests.train.tiny_run import publish_rows, tiny_run, write_target

if TYPE_CHECKING:
    from embedded.seaweedfs import SeaweedServer

CPU = torch.device("cpu")
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    publish_rows(str(tmp_path / "data"), tmp_path / "made")
    return str(tmp_path / "data")


@pytest.fixture
def train(tmp_path: Path, target: Path, dataset: str) -> Train:
    def run(
        name: str, stop_after: int | None = None, change: dict[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        values = tiny_run(dataset, target, str(tmp_path / name), **fields) | (change or {})
        steps: list[int] = []
        watch = Watch(
            lambda: stop_after is not None and len(steps) >= stop_after, lambda row: steps.append(row["step"])
        )
        return train_run(TrainRun.model_validate(values), Places(tmp_path / "work"), watch, CPU)

    return run


def test_a_stopped_run_goes_on_and_ends_like_one_that_was_never_stopped(train: Train, tmp_path: Path) -> None:
    whole = train("whole")
    stopped = train("parts", stop_after=5)
    assert (stopped["status"], stopped["step"]) == ("stopped", 6)
    rest = train("parts")
    assert (rest["status"], rest["step"]) == ("finished", whole["step"])
    weights = [load(Path(result["checkpoint"])).weights for result in (whole, rest)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert (tmp_path / "parts" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["step"] == rest["step"]
    assert read_metrics(tmp_path / "parts")[-1]["done"] == 1.0


def test_a_checkpoint_says_what_it_was_trained_on_and_refuses_anything_else(
    train: Train, dataset: str, tmp_path: Path
) -> None:
    stopped = train("run", stop_after=1)
    data = read_record(Path(stopped["checkpoint"]))["data"]
    assert (data["version"], data["num_rows"], data["tokenizer_fingerprint"]) == (1, 18, "f" * 64)
    second = publish_rows(dataset, tmp_path / "made")
    with pytest.raises(IncompatibleError, match=rf"version: 1 -> 2\n.*{data['manifest']}.* -> .*{second.name}"):
        train("run")
    assert train("run", change={"version": data["manifest"]}, max_steps=3)["status"] == "finished"


def test_a_run_goes_on_with_its_own_target_alone(train: Train, target: Path, tmp_path: Path) -> None:
    train("run", stop_after=1)
    with pytest.raises(IncompatibleError, match=r"\| target_dtype +\| float32 +\| bfloat16"):
        train("run", change={"dtype": "bfloat16"})
    other = shutil.copytree(target, tmp_path / "other")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    safetensors.torch.save_file(
        {name: value * 1.01 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(IncompatibleError, match=r"another target(.|\n)*\| target_fingerprint +\| files:"):
        train("run", change={"target": str(other)})
    moved = shutil.copytree(target, tmp_path / "moved")
    assert train("run", change={"target": str(moved)}, max_steps=3)["status"] == "finished"


def smaller(target: Path, folder: Path, **fields: int) -> str:
    """The target's configuration with other sizes."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(target)
    for name, value in fields.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return str(folder)


def test_data_that_does_not_fit_the_target_is_refused(train: Train, target: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no version 7"):
        train("run", change={"version": "7"})
    with pytest.raises(IncompatibleError, match=r"ids up to 94.*an embedding of 50 rows"):
        train("run", change={"target": smaller(target, tmp_path / "few-ids", vocab_size=50)})
    short = smaller(target, tmp_path / "short", max_position_embeddings=100)
    with pytest.raises(UsageError, match=r"Rows of up to 200 tokens .* 100 positions"):
        train("run", change={"target": short}, pack_tokens=200)


def test_memory_is_checked_before_the_target_loads(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(MemoryPlanError, match=r"pack_tokens|num_anchors"):
        train("run", pack_tokens=256, num_anchors=2**30)


def test_a_folder_is_trained_in_by_one_trainer_at_a_time(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        hold_folder(tmp_path / "run", 0),
        pytest.raises(TrainingError, match=r"Another trainer has worked in .*run for 0 s"),
    ):
        train("run", change={"stop_grace_s": 0.001})
    assert "waiting up to 0 s for its end" in caplog.text


def test_a_run_on_s3_goes_on_from_there_on_another_machine(
    s3_server: SeaweedServer, target: Path, tmp_path: Path
) -> None:
    s3 = s3_server.credentials
    base = f"{s3_server.uri}/{tmp_path.name}"
    publish_rows(f"{base}/data", tmp_path / "made", s3)
    values = tiny_run(f"{base}/data", target, f"{base}/run", keep_checkpoints=2)
    run = TrainRun.model_validate(values)
    steps: list[int] = []
    watch = Watch(lambda: len(steps) == 9, lambda row: steps.append(row["step"]))
    stopped = train_run(run, Places(tmp_path / "first", s3), watch, CPU)
    assert (stopped["status"], stopped["step"]) == ("stopped", 10)
    mirror = CheckpointStore(open_store(join_uri(run.output, "checkpoints"), s3), 2)
    assert mirror.steps() == [8, 10]
    assert {info.key.partition("/")[0] for info in mirror.store.list()} == {"step-00000008", "step-00000010"}

    done = train_run(run, Places(tmp_path / "second", s3), Watch(), CPU)
    here = train_run(
        TrainRun.model_validate(values | {"output": str(tmp_path / "local")}),
        Places(tmp_path / "third", s3),
        Watch(),
        CPU,
    )
    assert (done["status"], done["step"]) == ("finished", here["step"])
    fetched = mirror.fetch(done["step"], tmp_path / "fetched")
    weights = [load(path).weights for path in (fetched, Path(here["checkpoint"]))]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rows = open_store(run.output, s3).read("metrics.jsonl").splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, done["step"] + 1))
    left = [path for path in (tmp_path / "second").rglob("*") if path.suffix in {".arrow", ".safetensors", ".pt"}]
    assert left == []


def test_a_trainer_whose_output_was_taken_over_ends_and_writes_nothing_more_there(
    s3_server: SeaweedServer, target: Path, tmp_path: Path
) -> None:
    s3, base = s3_server.credentials, f"{s3_server.uri}/{tmp_path.name}"
    publish_rows(f"{base}/data", tmp_path / "made", s3)
    run = TrainRun.model_validate(tiny_run(f"{base}/data", target, f"{base}/run"))
    store = open_store(run.output, s3)
    other = OutputLease(store, "elsewhere")

    def take_over(row: dict[str, Any]) -> None:
        if row["step"] == 6:
            assert other.take(mark_of(store, LEASE))

    with pytest.raises(TrainingError, match=r"Another trainer .* has taken over .*/run"):
        train_run(run, Places(tmp_path / "here", s3), Watch(on_step=take_over), CPU)
    assert CheckpointStore(open_store(join_uri(run.output, "checkpoints"), s3), 2).steps() == [4]
    assert json.loads(store.read(LEASE))["place"] == "elsewhere"


@pytest.mark.parametrize("place", ["dataset", "target"])
def test_a_run_is_not_kept_inside_what_it_reads(train: Train, dataset: str, target: Path, place: str) -> None:
    holder = {"dataset": Path(dataset), "target": target}[place]
    before = sorted(holder.rglob("*"))
    for output in (holder, holder / "shards" / "run", holder / "x" / ".." / "run"):
        with pytest.raises(UsageError, match=f"lies inside the {place}|'\\.\\.'"):
            train("run", change={"output": str(output)})
    assert sorted(holder.rglob("*")) == before


@pytest.mark.parametrize("output", ["taken", "taken/below", "run"])
def test_an_output_that_can_not_be_a_folder_is_named(train: Train, tmp_path: Path, output: str) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "run" / "checkpoints").parent.mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match=output):
        train(output, max_steps=1)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "x"}, {"vocab_size": None}, {"num_attention_heads": 0}, {"hidden_size": 1}, None]
)
def test_a_target_with_a_damaged_configuration_is_named(
    train: Train, tmp_path: Path, target: Path, changes: dict[str, Any] | None
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    fields = json.loads((target / "config.json").read_text("utf-8"))
    (damaged / "config.json").write_text("[" * 100_000 if changes is None else json.dumps(fields | changes), "utf-8")
    with pytest.raises(ModelError, match="damaged"):
        train("run", change={"target": str(damaged)})


@pytest.mark.parametrize(("layers", "message"), [(3, r"9 weights of text layers .*layers\.3\."), (5, "lacks 9 of 48")])
def test_a_target_with_the_configuration_of_another_is_named(
    train: Train, tmp_path: Path, target: Path, layers: int, message: str
) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    fields = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": layers}), "utf-8")
    with pytest.raises(ModelError, match=message):
        train("run", change={"target": str(other)}, drafter={"num_hidden_layers": 1, "target_layer_ids": [0, 2]})


def test_data_without_a_token_to_learn_is_refused(train: Train, tmp_path: Path) -> None:
    publish_rows(str(tmp_path / "empty"), tmp_path / "made-empty", prompt=24)
    with pytest.raises(DatasetError, match="18 rows and no token to learn"):
        train("run", change={"dataset": str(tmp_path / "empty")})


def test_a_target_with_cut_weights_is_named(train: Train, tmp_path: Path, target: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(target, damaged)
    (damaged / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:-500])
    with pytest.raises(ModelError, match="damaged"):
        train("run", change={"target": str(damaged)})
