"""What the documents tell people to set, to press and to open is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest
import yaml

from dflash.config import MergeRun, RefreshRun, SpreadRun, TokenizeRun
from dflash.eval.config import EvaluateRun, ExportRun
from dflash.generate.config import GenerateRun, RegenerateRun
from dflash.runs import DrafterRun
from dflash.train.plan import PlanRun
from dflash.train.run import TrainRun

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/operations.md")
MODELS = (
    *(TrainRun, PlanRun, DrafterRun, TokenizeRun, SpreadRun, MergeRun, RefreshRun),
    *(GenerateRun, RegenerateRun, EvaluateRun, ExportRun),
)
NOT_SETTINGS = {"generation.batch.completed", "dflash.tokens_per_s"}  # an event, and a field of an answer
FILES = r"json|jsonl|ndjson|toml|yaml|txt|py|sh|md|arrow|safetensors|db|log|pt|png"


def text_of(name: str) -> str:
    return " ".join((REPOSITORY / name).read_text(encoding="utf-8").split())


def documented_settings() -> set[str]:
    """Names behind `--set`, assignments between backticks, and names with dots in them that are no files."""
    found: set[str] = set()
    for text in map(text_of, DOCUMENTS):
        found |= set(re.findall(r"--set '?([a-z_.]+)=", text))
        found |= set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)=[^` ]+`", text))
        found |= set(re.findall(rf"`([a-z_]+(?:\.(?!(?:{FILES})`)[a-z_]+)+)`", text))
    return found - NOT_SETTINGS


def has(model: type[pydantic.BaseModel], names: list[str]) -> bool:
    """Whether a model has a field, or its field has one, and so on."""
    field = model.model_fields.get(names[0])
    if field is None or len(names) == 1:
        return field is not None
    inner = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
    return any(issubclass(part, pydantic.BaseModel) and has(part, names[1:]) for part in inner)


def test_documents_name_settings() -> None:
    assert len(documented_settings()) > 15


@pytest.mark.parametrize("setting", sorted(documented_settings()))
def test_each_setting_is_one_of_some_run(setting: str) -> None:
    assert any(has(model, setting.split(".")) for model in MODELS)


@pytest.mark.parametrize("setting", ["train.topology.server_uri", "server_url", "gate.reason"])
def test_a_setting_that_is_none_is_found(setting: str) -> None:
    assert not any(has(model, setting.split(".")) for model in MODELS)


def test_each_deployment_to_press_is_there() -> None:
    content: dict[str, Any] = yaml.safe_load((REPOSITORY / "deployments" / "prefect.yaml").read_text())
    there = {item["name"] for item in content["deployments"]}
    pressed = {
        name
        for text in map(text_of, DOCUMENTS)
        for name in re.findall(r"(?:Deployments > |[Dd]eployment )`([a-z-]+)`", text)
    }
    assert len(pressed) > 8
    assert pressed <= there


def test_each_file_to_run_or_open_is_there() -> None:
    folders = "docker|benchmarks|deployments|docs|examples|tests|flows|embedded|dflash"
    named = {
        name
        for text in map(text_of, DOCUMENTS)
        for name in re.findall(rf"[`\s(]((?:{folders})/[\w./-]+\.(?:sh|py|yaml|toml|md|Dockerfile))\b", text)
    }
    assert len(named) > 8
    assert {name for name in named if not (REPOSITORY / name).exists()} == set()
