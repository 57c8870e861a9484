from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.errors import DamagedDatasetError
from dflash.generate.looks import MAX_SAMPLES, BatchCounts, compression_ratio, look_at
from dflash.generate.parts import BatchLog
from dflash.generate.report import assess_batch, render_markdown, save_report
from dflash.storage import open_store
from tests.generate.conftest import MakeRun, generate
from tests.generate.stub_server import Stub, answer, serving
from tests.storage.faults import FaultPlan, FaultStore

TEXT = "A whole answer with words of its own."


def look(content: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return look_at(
        {"id": "a", "messages": [{"role": "assistant", "content": content}], "finish_reason": "stop"} | fields
    )


@pytest.mark.parametrize(
    ("found", "marks"),
    [
        (look(output_token_ids=[1]), []),
        (look(), ["no_ids"]),
        (look("again and " * 300, output_token_ids=[1]), ["loop"]),
        (look("I'm sorry, but I can't help with that.", output_token_ids=[1]), ["refusal"]),
        (look("I\u2019m unable to", output_token_ids=[1]), ["refusal"]),
        (look("很抱歉", output_token_ids=[1]), ["refusal"]),
        (look("我喜欢", output_token_ids=[1]), []),
        (look("I can do that, and I cannot fail.", output_token_ids=[1]), []),
        (look("They ask for\nharm.\n</think>\n\nI'm sorry, but no.", output_token_ids=[1]), ["refusal"]),
        (look("<think>\nHm.\n</think>\n\n", output_token_ids=[1]), ["think_only"]),
        (look("<think>\nI can't\n</think>\n\nYes.", output_token_ids=[1]), []),
        (look("Write </think> behind it", reasoning_content="Hm.", output_token_ids=[1]), []),
    ],
)
def test_marks(found: dict[str, Any], marks: list[str]) -> None:
    assert found["marks"] == marks


def test_a_trace_alone_is_marked() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    found = look_at({"id": "a", "messages": [message], "finish_reason": "length", "thinking_truncated": True})
    assert found["marks"] == ["think_only", "thinking_truncated", "no_ids"]


@given(st.text())
def test_any_text_has_a_ratio(text: str) -> None:
    assert compression_ratio(text) > 0


@given(st.lists(st.integers(0, 10_000), unique=True, max_size=60))
def test_samples_depend_on_the_ids_alone(numbers: list[int]) -> None:
    def count(ids: list[int]) -> BatchCounts:
        counts = BatchCounts()
        for number in ids:
            counts.add(look(id=f"q{number}"), "part-00000.jsonl")
        return counts

    one, other = count(numbers), count(sorted(numbers))
    assert one.drawn == other.drawn
    assert len(one.worst) == len(one.drawn) == min(MAX_SAMPLES, len(numbers))


def test_the_report_shows_the_worst_and_holds_no_markup_of_records(tmp_path: Path, make_run: MakeRun) -> None:
    def mixed(request: dict[str, Any]) -> dict[str, Any]:
        number = int(request["messages"][-1]["content"].split()[-1])
        texts = {
            3: "loop " * 500,
            4: "I'm sorry, I can't.",
            5: "| a | `b` <script>alert(1)</script>\n# no heading",
            6: "Это ответ",
        }
        reply = answer(request)
        reply["choices"][0]["message"]["content"] = texts.get(number, TEXT)
        return reply

    with serving(Stub(answer=mixed)) as stub:
        generate(make_run(stub, 20), tmp_path / "work")
    log = BatchLog(open_store(str(tmp_path / "batch")))
    log.load()
    report = assess_batch(log.store, log.counts)
    assert (report.num_records, report.marks["loop"], report.marks["refusal"]) == (20, 1, 1)
    assert report.scripts == {"latin": 19, "cyrillic": 1}
    worst = next(sample for sample in report.samples if sample.why != "drawn")
    assert (worst.id, worst.question) == ("q-3", "question 3")
    assert "characters ...]" in worst.answer
    text = render_markdown(report)
    assert "<script>" not in "".join(line for line in text.splitlines() if not line.startswith("    "))
    assert "\n# no heading" not in text
    save_report(log.store, report)
    save_report(log.store, report)
    assert (tmp_path / "batch" / "_report.md").read_text() == text


def test_two_runs_that_keep_their_report_at_once_both_go_on(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        generate(make_run(stub, 3), tmp_path / "work")
    store = open_store(str(tmp_path / "batch"))
    log = BatchLog(store)
    log.load()
    report = assess_batch(store, log.counts)
    save_report(store, replace(report, prompt_tokens=7))

    class Raced(FaultPlan):
        def run(self, call: str, operation: Callable[[], Any]) -> Any:
            if call not in self.calls:
                self.calls.append(call)
                key = call.rsplit(maxsplit=1)[-1]
                store.replace(key, b"another run's", if_match=store.head(key).etag)
            return operation()

    plan = Raced()
    save_report(FaultStore(store, plan), report)  # looks for the ETag, is overtaken, looks again
    assert plan.calls == ["replace _report.json", "replace _report.md"]
    assert json.loads((tmp_path / "batch" / "_report.json").read_text())["prompt_tokens"] == report.prompt_tokens
    assert (tmp_path / "batch" / "_report.md").read_text() == render_markdown(report)


def test_the_report_has_the_rate_of_failures(tmp_path: Path, make_run: MakeRun) -> None:
    def stubborn(request: dict[str, Any]) -> dict[str, Any]:
        return answer(request, finish_reason="abort" if "question 3" in str(request["messages"]) else "stop")

    with serving(Stub(answer=stubborn)) as stub:
        outcome = generate(make_run(stub, 8, max_attempts=2, max_failed_share=0.2), tmp_path / "work")
    log = BatchLog(open_store(str(tmp_path / "batch")))
    log.load()
    found = assess_batch(log.store, log.counts)
    assert found == assess_batch(log.store, log.counts, outcome)
    assert found.to_json()["failures"] == {"num_prompts": 8, "num_failed": 1, "failed_tries": {"aborted": 2}}
    assert "1 of 8 prompts failed (12.500 %); failed tries: aborted 2." in render_markdown(found)
    for other in ("{}", "", '{"num_prompts": "8", "num_failed": 1, "failed_tries": {}}'):
        (tmp_path / "batch" / "_SUCCESS").write_text(other)
        unknown = assess_batch(log.store, log.counts)
        assert unknown.failures is None
        assert "prompts failed" not in render_markdown(unknown)


def test_counts_are_the_same_without_the_indexes(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        generate(make_run(stub, 12), tmp_path / "work")
    first = BatchLog(open_store(str(tmp_path / "batch")))
    first.load()
    for index in (tmp_path / "batch" / "_parts").iterdir():
        index.unlink()
    second = BatchLog(open_store(str(tmp_path / "batch")))
    second.load()
    assert (second.counts, second.parts, second.done) == (first.counts, first.parts, first.done)
    (tmp_path / "batch" / "_parts" / "part-00000.json").write_text("{}")
    third = BatchLog(open_store(str(tmp_path / "batch")))
    third.load()
    assert third.counts == first.counts


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 5},
        {"request": None},
        {"request": ""},
        {"output_tokens": "many"},
        {"ratio": None},
        {"script": []},
        {"marks": 3},
    ],
)
def test_an_index_of_other_types_is_not_believed(tmp_path: Path, make_run: MakeRun, changes: dict[str, Any]) -> None:
    with serving(Stub()) as stub:
        generate(make_run(stub, 3), tmp_path / "work")
    store = open_store(str(tmp_path / "batch"), None)
    (expected := BatchLog(store)).load()
    path = tmp_path / "batch" / "_parts" / "part-00000.json"
    index = json.loads(path.read_text("utf-8"))
    for records in ([index["records"][0] | changes, *index["records"][1:]], index["records"][1:], [7], {"a": 1}):
        path.write_text(json.dumps(index | {"records": records}), "utf-8")
        (found := BatchLog(store)).load()
        assert (found.counts, found.done, found.parts) == (expected.counts, expected.done, expected.parts)


@pytest.mark.parametrize(
    "changes", [{"id": 5}, {"request_hash": 5}, {"request_hash": ""}, {"output_tokens": "many"}, {"source": [1]}]
)
def test_a_record_of_another_program_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    record = {"id": "a", "messages": [{"role": "assistant", "content": "b"}], "request_hash": "c"} | changes
    (tmp_path / "part-00000.jsonl").write_text(json.dumps(record) + "\n", "utf-8")
    with pytest.raises(DamagedDatasetError, match=r"part-00000\.jsonl, line 1, is no record"):
        BatchLog(open_store(str(tmp_path), None)).load()
