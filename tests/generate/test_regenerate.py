"""What is found in a batch and in a dataset version, and that only that is asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.config import GateThresholds, TokenizeRun
from dflash.data.tokenize_run import tokenize_dataset
from dflash.data.workspace import Workspace
from dflash.errors import UsageError
from dflash.generate.config import GenerateRun, RegenerateRun
from dflash.generate.regenerate import find_prompts
from tests.generate.conftest import completions, generate, prompt, write_prompts
from tests.generate.stub_server import Stub, answer, serving

QUESTION = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = "Sunlight is scattered by air, and blue light most of all, so it comes from everywhere."


def record(name: str, content: Any = ANSWER, **fields: Any) -> dict[str, Any]:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    return {"id": name, "messages": messages, "finish_reason": "stop"} | fields


RECORDS = [
    record("good", output_tokens=21),
    record("cut", finish_reason="length", output_tokens=128, sampling={"max_tokens": 128}),
    record("empty", None),
    record("tiny", "Yes.", output_tokens=3),
    record("aborted", finish_reason="abort"),
    record("conflict", f"<think>a</think>{ANSWER}", source="maths"),
    {"id": "strange", "messages": [{"role": "king", "content": "x"}]},
    record("broken-call", tools=[{"type": "function"}]),
]
RECORDS[5]["messages"][1]["reasoning_content"] = "b"
RECORDS[7]["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": "{"}}]


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    lines = [json.dumps(one) for one in RECORDS]
    (folder / "a.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(lines[4:]) + '\n{"id": "torn", "mess')
    return folder


def make(source: Path, tmp_path: Path, url: str = "http://127.0.0.1:1/v1", **fields: Any) -> RegenerateRun:
    run = GenerateRun(prompts="-", batch=str(tmp_path / "new"), endpoints=(url,))
    return RegenerateRun(source=str(source), generate=run, **fields)


def test_only_what_is_lacking_is_asked_again(tmp_path: Path, batch: Path) -> None:
    with serving(Stub()) as stub:
        run = make(batch, tmp_path, stub.url)
        search = find_prompts(run, None, tmp_path / "cache")
        assert search.found == {"length": 1, "empty": 1, "few_tokens": 1, "rejected": 3}
        assert (search.num_records, search.num_lost) == (9, 1)
        assert search.prompts is not None
        assert find_prompts(run, None, tmp_path / "cache") == search, "asking again finds its own prompts"
        generate(run.generate.model_copy(update={"prompts": search.prompts}), tmp_path / "work")
        limits = {body["messages"][0]["content"]: body["max_tokens"] for body in stub.bodies}
    assert limits == {QUESTION["content"]: limits[QUESTION["content"]]}
    new = {one.id: one for one in completions(tmp_path / "new")}
    assert sorted(new) == ["aborted", "broken-call", "conflict", "cut", "empty", "tiny"]
    assert new["conflict"].source == "maths"
    assert new["broken-call"].tools == [{"type": "function"}]
    assert sorted(body["max_tokens"] for body in stub.bodies) == [512, *[8192] * 5]


def test_findings_can_be_chosen(tmp_path: Path, batch: Path) -> None:
    run = make(batch, tmp_path, findings=("length",), cut_max_tokens=1000)
    search = find_prompts(run, None, tmp_path / "cache")
    assert search.found == {"length": 1}
    assert search.prompts is not None
    (line,) = Path(search.prompts).read_text().splitlines()
    assert json.loads(line)["sampling"] == {"max_tokens": 1000}
    with pytest.raises(UsageError, match="begun with another source or other findings"):
        find_prompts(make(batch, tmp_path), None, tmp_path / "cache")


def test_what_was_cut_keeps_its_seed_and_the_rest_gets_another(tmp_path: Path) -> None:
    """A server that honours seeds would give the six tokens again."""
    tiny = {"token_ids": [5, 2]}

    def stubborn(request: dict[str, Any]) -> dict[str, Any]:
        is_cut = "question 1" in str(request["messages"])
        reply = answer(request, finish_reason="length" if is_cut else "stop", **({} if is_cut else tiny))
        return reply | {"usage": {"completion_tokens": 11 if is_cut else 2}}

    with serving(Stub(answer=stubborn)) as stub:
        path = write_prompts(tmp_path / "prompts.jsonl", [prompt(1), prompt(2)])
        run = GenerateRun(prompts=str(path), batch=str(tmp_path / "one"), endpoints=(stub.url,))
        seeds = [_generate_and_see(run, stub, tmp_path)]
        for number, source in enumerate(("one", "two")):
            batch = str(tmp_path / ("two", "three")[number])
            again = RegenerateRun(source=str(tmp_path / source), generate=run.model_copy(update={"batch": batch}))
            found = find_prompts(again, None, tmp_path / "cache")
            assert found.found == {"length": 1, "few_tokens": 1}
            asked = again.generate.model_copy(update={"prompts": found.prompts})
            seeds.append(_generate_and_see(asked, stub, tmp_path))
    assert len({one["question 1"] for one in seeds}) == 1, "more of the same answer"
    assert len({one["question 2"] for one in seeds}) == 3, "another answer each time"


def _generate_and_see(run: GenerateRun, stub: Stub, tmp_path: Path) -> dict[str, int]:
    """The seed that each question was asked with."""
    stub.bodies.clear()
    generate(run, tmp_path / "work")
    return {body["messages"][-1]["content"]: body["seed"] for body in stub.bodies}


@pytest.mark.parametrize(("limit", "asked"), [(500_000, 1_048_576), (0, 32_768), (True, 32_768), ("8", 32_768)])
def test_a_limit_that_can_not_be_multiplied_loses_no_prompt(tmp_path: Path, limit: Any, asked: int) -> None:
    (tmp_path / "old").mkdir()
    cut = record("cut", finish_reason="length", output_tokens=128, sampling={"max_tokens": limit})
    (tmp_path / "old" / "a.jsonl").write_text(json.dumps(cut) + "\n")
    search = find_prompts(make(tmp_path / "old", tmp_path), None, tmp_path / "cache")
    assert (search.num_lost, search.found) == (0, {"length": 1})
    assert search.prompts is not None
    assert json.loads(Path(search.prompts).read_text())["sampling"] == {"max_tokens": asked}


def test_nothing_is_written_into_a_batch_that_was_not_regenerated(tmp_path: Path, batch: Path) -> None:
    into_itself = make(batch, batch.parent)
    into_itself = into_itself.model_copy(
        update={"generate": into_itself.generate.model_copy(update={"batch": str(batch)})}
    )
    with pytest.raises(UsageError, match=r"holds completions that weren't regenerated: .*Give a new folder"):
        find_prompts(into_itself, None, tmp_path / "cache")
    assert sorted(path.name for path in batch.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_nothing_lacking_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.jsonl").write_text(json.dumps(RECORDS[0]) + "\n")
    search = find_prompts(make(tmp_path / "old", tmp_path), None, tmp_path / "cache")
    assert (search.prompts, search.found) == (None, {})
    assert not (tmp_path / "new").exists()


def test_a_dataset_version_knows_its_loss_tokens_and_rejects(
    tmp_path: Path, batch: Path, smollm2_tokenizer_dir: Path
) -> None:
    loose = {name: 1.0 for name, field in GateThresholds.model_fields.items() if name.endswith("_share")}
    tokenize = TokenizeRun(
        source=str(batch),
        dataset=str(tmp_path / "train"),
        tokenizer=str(smollm2_tokenizer_dir),
        num_workers=1,
        gate=GateThresholds(**loose, max_median_ratio=1000, min_median_ratio=0, max_damaged_files=9),
    )
    tokenize_dataset(tokenize, None, Workspace(tmp_path / "work", tmp_path / "cache"))
    run = make(tmp_path / "train", tmp_path, few_tokens=3)
    search = find_prompts(run, None, tmp_path / "cache")
    # "Yes." and the end token are three loss tokens.
    assert search.found == {"length": 1, "empty": 1, "few_tokens": 1, "rejected": 3}
    with pytest.raises(UsageError, match="is no dataset root"):
        find_prompts(make(batch, tmp_path, version="1"), None, tmp_path / "cache")
