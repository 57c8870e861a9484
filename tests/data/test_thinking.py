from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.config import GateThresholds, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.data.thinking import count_thinking
from dflash.data.tokenize_run import tokenize_dataset
from dflash.data.tokenizer import load_tokenizer
from dflash.data.workspace import Workspace


def record(number: int, answer: dict[str, Any], thinking: bool | None) -> dict[str, Any]:
    kwargs = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    messages = [{"role": "user", "content": f"What is {number} + 1?"}, {"role": "assistant"} | answer]
    return {"id": str(number), "messages": messages, "finish_reason": "stop"} | kwargs


@pytest.mark.parametrize("on", [0, 2])
def test_modes_are_counted_from_the_rows(tmp_path: Path, qwen36_dir: Path, on: int) -> None:
    trace = {"content": "The sum.", "reasoning_content": "Add one."}
    records = [record(number, trace, True) for number in range(on)]
    records += [record(number + on, {"content": f"It is {number}."}, False) for number in range(3)]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    loose = GateThresholds(max_single_loss_count_share=1, max_tiny_mask_share=1, max_duplicate_share=1)
    run = TokenizeRun(
        source=str(tmp_path / "source"),
        dataset=str(tmp_path / "data"),
        tokenizer=str(qwen36_dir),
        num_workers=1,
        gate=loose,
    )
    manifest = tokenize_dataset(run, None, Workspace(tmp_path / "work", tmp_path / "cache"))
    (entry,) = manifest.shards
    path = DatasetRoot.open(run.dataset).fetch_shard(entry)
    expected = {"off": 3} | ({"on": on} if on else {})
    assert count_thinking(path, entry.num_rows, load_tokenizer(qwen36_dir, probe=False)) == expected


def test_a_template_without_the_flag_says_nothing(tmp_path: Path, smollm2_tokenizer_dir: Path) -> None:
    assert count_thinking(tmp_path / "none", 5, load_tokenizer(smollm2_tokenizer_dir, probe=False)) == {}
