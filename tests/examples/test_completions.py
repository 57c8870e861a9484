"""The committed completions are what their README says: each record consistent with its own ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

CATEGORIES = {"maths", "code", "explain", "lists", "writing", "chat", "rewrite", "instructions"}
END_ID = 2


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def prompts(example_completions: Path) -> list[dict[str, Any]]:
    return _read(example_completions / "prompts.jsonl")


@pytest.fixture(scope="module")
def heldout(example_completions: Path) -> list[dict[str, Any]]:
    return _read(example_completions / "heldout_prompts.jsonl")


@pytest.fixture(scope="module")
def parts(example_completions: Path) -> list[list[dict[str, Any]]]:
    return [_read(path) for path in sorted(example_completions.glob("part-*.jsonl"))]


@pytest.fixture(scope="module")
def records(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [record for part in parts for record in part]


@pytest.fixture(scope="module")
def tokenizer(smollm2_tokenizer_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(smollm2_tokenizer_dir)


def test_every_prompt_is_answered_once(prompts: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    assert len(records) >= 1_600
    by_id = {record["id"]: record for record in records}
    assert len(by_id) == len(records)
    assert by_id.keys() == {prompt["id"] for prompt in prompts}
    for prompt in prompts:
        record = by_id[prompt["id"]]
        assert record["messages"][:-1] == prompt["messages"]
        assert record["source"] == prompt["source"]


def test_every_part_is_a_mix(parts: list[list[dict[str, Any]]]) -> None:
    assert len(parts) == 16
    for part in parts:
        assert 100 <= len(part) <= 110
        assert {record["source"] for record in part} == CATEGORIES


def test_the_text_is_what_the_ids_say(records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> None:
    for record in records:
        answer = record["messages"][-1]
        assert answer["role"] == "assistant"
        ids = record["output_token_ids"]
        assert record["output_tokens"] == len(ids) <= record["sampling"]["max_tokens"] == 128
        if record["finish_reason"] == "stop":
            assert ids[-1] == END_ID
            ids = ids[:-1]
        else:
            assert record["finish_reason"] == "length"
            assert len(ids) == 128
        assert END_ID not in ids
        assert answer["content"] == tokenizer.decode(ids), record["id"]
        assert answer["content"].strip(), record["id"]


def test_the_prompt_ids_are_the_rendered_prompt(
    records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> None:
    for record in records:
        text = tokenizer.apply_chat_template(record["messages"][:-1], add_generation_prompt=True, tokenize=False)
        assert record["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False), record["id"]


def test_heldout_prompts_are_apart(prompts: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    asked = {json.dumps(_without_system(prompt)) for prompt in prompts}
    assert len(asked) == len(prompts)
    assert len(heldout) >= 60
    assert set(Counter(prompt["source"] for prompt in heldout)) == CATEGORIES
    assert not {prompt["id"] for prompt in prompts} & {prompt["id"] for prompt in heldout}
    for prompt in heldout:
        assert json.dumps(_without_system(prompt)) not in asked, prompt["id"]
        # Conversations share the follow-up questions, never the opening.
        assert _without_system(prompt)[0] not in [_without_system(other)[0] for other in prompts], prompt["id"]


def test_the_prompts_can_be_written_again(example_completions: Path, tmp_path: Path) -> None:
    (tmp_path / "material").symlink_to(example_completions / "material")
    script = tmp_path / "write_prompts.py"
    script.write_bytes((example_completions / "write_prompts.py").read_bytes())
    subprocess.run([sys.executable, str(script)], check=True)
    for name in ("prompts.jsonl", "heldout_prompts.jsonl"):
        assert (tmp_path / name).read_bytes() == (example_completions / name).read_bytes()


def _without_system(prompt: dict[str, Any]) -> list[dict[str, str]]:
    return [message for message in prompt["messages"] if message["role"] != "system"]
