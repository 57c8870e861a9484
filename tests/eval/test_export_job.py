"""Export as a job: gate, files, model card, tau before and after; local and S3."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from dflash.errors import DflashError, GateError, ModelError, StorageError, UsageError
from dflash.eval.config import DecodeConfig, EvaluateRun, ExportRun
from dflash.eval.export_job import export_run, is_exported
from dflash.eval.job import evaluate_run
from dflash.model.export import load_drafter
from dflash.storage import S3Store
from dflash.train.checkpoint_record import RECORD, record_digest
from tests.eval.small_run import SmallRun


def export_of(small: SmallRun, output: object, **values: object) -> ExportRun:
    return ExportRun.model_validate(
        {"checkpoint": str(small.folder), "output": str(output), "format": "sglang"} | values
    )


def evaluate_small(small: SmallRun, tmp_path: Path) -> float:
    decode = DecodeConfig(max_new_tokens=6)
    run = EvaluateRun(checkpoint=str(small.folder), prompts=str(small.prompts), decode=decode)
    return evaluate_run(run, None, tmp_path / "cache").record.tau


def test_an_evaluated_checkpoint_is_exported_with_its_card(small_run: SmallRun, tmp_path: Path) -> None:
    small_run.save(7)
    tau = evaluate_small(small_run, tmp_path)
    run = export_of(small_run, tmp_path / "out", prompts=str(small_run.prompts), dtype="float32")
    result = export_run(run, None, tmp_path / "cache")
    assert sorted(result.files) == ["README.md", "config.json", "model.safetensors"]
    assert (result.tau, result.step) == (tau, 7)
    assert result.remeasured is not None
    assert result.remeasured.tau_after == result.remeasured.tau_before == pytest.approx(tau)
    drafter = load_drafter(tmp_path / "out")
    assert all(bool(tensor.isfinite().all()) for tensor in drafter.state_dict().values())
    card = (tmp_path / "out" / "README.md").read_text()
    for part in (
        "v000003-abcdefabcdef", "f" * 64, "off: 77", "| overall | 3 | ", f"{tau:.3f}", "mean over verify rounds",
        str(small_run.target), "--speculative-algorithm DFLASH", '"num_speculative_tokens": 3', torch.__version__,
        "On 3 prompts tau was",
    ):  # fmt: skip
        assert part in card, part
    assert is_exported(run, None)
    assert not is_exported(export_of(small_run, tmp_path / "none"), None)
    assert not is_exported(run.model_copy(update={"format": "vllm"}), None)
    small_run.save(8, seed=8)
    assert not is_exported(run, None), "the output holds an export of older weights"
    evaluated_again = EvaluateRun(
        checkpoint=str(tmp_path / "out"), target=str(small_run.target), prompts=str(small_run.prompts),
        decode=DecodeConfig(max_new_tokens=6),
    )  # fmt: skip
    assert evaluate_run(evaluated_again, None, tmp_path / "cache").record.tau == pytest.approx(tau)


def test_weights_that_nobody_measured_are_refused(small_run: SmallRun, tmp_path: Path) -> None:
    small_run.save(1, seed=1)
    with pytest.raises(GateError, match="has no evaluation, so nobody knows"):
        export_run(export_of(small_run, tmp_path / "out"), None, tmp_path / "cache")
    evaluate_small(small_run, tmp_path)
    newer = small_run.save(2, seed=2)
    stale = (small_run.folder / "checkpoints" / "step-00000001" / "evaluation.json").read_bytes()
    (newer / "evaluation.json").write_bytes(stale)
    with pytest.raises(GateError, match=r"evaluation of other weights .* at step 1, not .* at step 2"):
        export_run(export_of(small_run, tmp_path / "out"), None, tmp_path / "cache")
    assert not (tmp_path / "out").exists()
    result = export_run(export_of(small_run, tmp_path / "out", without_evaluation=True), None, tmp_path / "cache")
    assert result.tau is None
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Nobody evaluated this drafter" in card
    assert "tau was not measured again" in card
    with pytest.raises(ModelError, match="holds 3 objects already"):
        export_run(export_of(small_run, tmp_path / "out", without_evaluation=True), None, tmp_path / "cache")
    again = export_of(small_run, tmp_path / "again", checkpoint=str(tmp_path / "out"))
    with pytest.raises(UsageError, match="is an export already"):
        export_run(again, None, tmp_path / "cache")


def test_the_speculators_layout_goes_to_s3_with_its_configuration_last(
    small_run: SmallRun, s3_store: S3Store, tmp_path: Path
) -> None:
    small_run.save(1)
    uri = f"{s3_store.uri}/export"
    run = export_of(small_run, uri, format="speculators", without_evaluation=True)
    # What an upload of other weights leaves when it is cut.
    s3_store.put_if_absent("export/model.safetensors", b"of another run")
    s3_store.put_if_absent("export/notes.txt", b"of a person")
    with pytest.raises(ModelError, match="holds 2 objects already"):
        export_run(run, s3_store.credentials, tmp_path / "cache")
    s3_store.delete(["export/notes.txt"])
    result = export_run(run, s3_store.credentials, tmp_path / "cache")
    stored = {info.key: info for info in s3_store.list("export")}
    assert sorted(stored) == ["export/README.md", "export/config.json", "export/model.safetensors"]
    assert {key.removeprefix("export/"): info.size for key, info in stored.items()} == result.files
    assert stored["export/config.json"].modified_s >= max(info.modified_s for info in stored.values()) - 1e-6
    config = json.loads(s3_store.read("export/config.json"))
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(small_run.target)
    evaluated = EvaluateRun(
        checkpoint=uri, target=str(small_run.target), prompts=str(small_run.prompts), limit=1,
        decode=DecodeConfig(max_new_tokens=4),
    )  # fmt: skip
    assert evaluate_run(evaluated, s3_store.credentials, tmp_path / "cache").record.report.tau >= 1
    with pytest.raises(ModelError, match="holds 4 objects already"):
        export_run(run, s3_store.credentials, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("export-*"))


def test_an_output_that_no_new_folder_can_take_is_named(small_run: SmallRun, tmp_path: Path) -> None:
    small_run.save(1, dataset=str(tmp_path / "data"))

    def refused(output: Path, message: str, error: type[DflashError] = ModelError) -> None:
        run = export_of(small_run, output, without_evaluation=True)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(error, match=message):
            export_run(run, None, tmp_path / "cache")
        assert sorted(tmp_path.rglob("*")) == before

    (tmp_path / "parent" / "empty").mkdir(parents=True)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".a.part").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    refused(tmp_path / "parent", "holds 1 objects already")
    refused(tmp_path / "hidden", "holds 1 objects already")
    refused(tmp_path / "link", "is a link")
    refused(tmp_path / "file", "file", StorageError)
    refused(tmp_path / "file" / "below", "below failed, and nothing of it is there")
    refused(tmp_path / ("y" * 250), "nothing of it is there")
    refused(tmp_path / "data" / "shards" / "export", "lies inside the dataset", UsageError)


@pytest.mark.parametrize("max_bytes", [0, 200, 20_000])
def test_a_full_disk_leaves_nothing_of_an_export(small_run: SmallRun, tmp_path: Path, max_bytes: int) -> None:
    small_run.save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"out failed, and nothing of it is there"):
            export_run(export_of(small_run, tmp_path / "out", without_evaluation=True), None, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("*out*"))


def test_a_record_of_another_version_still_gets_a_card(small_run: SmallRun, tmp_path: Path) -> None:
    path = small_run.save(1)
    record = json.loads((path / RECORD).read_text())["record"]
    record |= {"config": {"optimizer": 3}, "progress": {"batch": {"num_tokens": "x"}}}
    record |= {"data": {"num_rows": "x", "thinking": 3}}
    (path / RECORD).write_text(json.dumps({"sha256": record_digest(record), "record": record}))
    export_run(export_of(small_run, tmp_path / "out", without_evaluation=True), None, tmp_path / "cache")
    assert "| rows | not recorded |" in (tmp_path / "out" / "README.md").read_text()
