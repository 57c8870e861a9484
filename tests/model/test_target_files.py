from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.errors import ModelError
from dflash.model.target_files import target_fingerprint

SIZE = 40 << 20


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "4.0"}))
    (folder / "model.safetensors").write_bytes(b"header" + bytes(SIZE))
    return folder


def test_the_same_target_saved_again_elsewhere_has_the_same_fingerprint(target: Path, tmp_path: Path) -> None:
    before = target_fingerprint(str(target))
    moved = target.rename(tmp_path / "moved")
    saved_again = {"transformers_version": "5.0", "dtype": "float32", "hidden_size": 8}
    (moved / "config.json").write_text(json.dumps(saved_again))
    assert before.startswith("files:")
    assert target_fingerprint(str(moved)) == before


@pytest.mark.parametrize("change", ["header", "tail", "middle", "size", "name", "config", "another file"])
def test_another_target_has_another_fingerprint(target: Path, change: str) -> None:
    before = target_fingerprint(str(target))
    weights = target / "model.safetensors"
    at = {"header": 0, "tail": SIZE, "middle": SIZE // 2}
    if change in at:
        with weights.open("r+b") as file:
            file.seek(at[change])
            file.write(b"!" * (2 << 20 if change == "middle" else 6))
    elif change == "size":
        weights.write_bytes(weights.read_bytes() + b"\0")
    elif change == "name":
        weights.rename(target / "model-00001-of-00001.safetensors")
    elif change == "config":
        (target / "config.json").write_text(json.dumps({"hidden_size": 8, "rope_theta": 1}))
    else:
        (target / "model-2.safetensors").write_bytes(b"")
    assert target_fingerprint(str(target)) != before


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_configuration_is_named(target: Path, content: bytes) -> None:
    (target / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match="target can't be read"):
        target_fingerprint(str(target))


def test_an_id_is_known_by_the_commit_that_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert target_fingerprint("someone/model") == f"commit:{'c' * 40}"
    with pytest.raises(ModelError, match="neither a folder nor in the cache"):
        target_fingerprint("someone/else")
