"""Whole runs against a real HTTP server: each id once, whatever breaks."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import dflash.generate.session as session_module
from dflash.config import MergeRun, RefreshRun, TokenizeRun
from dflash.data.dataset import DatasetRoot
from dflash.data.discovery import find_batches
from dflash.errors import DatasetError, UsageError
from dflash.generate.config import GenerateRun
from dflash.generate.progress import GenerateProgress
from dflash.generate.session import GenerateSession
from dflash.storage import open_store
from dflash.validation import problems_of
from tests.generate.conftest import MakeRun, completions, generate, prompt, records, write_prompts
from tests.generate.stub_server import FAULTS, Answer, Stub, answer, serving
from tests.storage.faults import FaultPlan, FaultStore


def aborting(question: str) -> Answer:
    """Answers all but one question."""

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        return answer(request, finish_reason="abort" if question in str(request["messages"]) else "stop")

    return reply


def test_a_batch_is_whole_and_read_by_our_reader(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        outcome = generate(make_run(stub, 25), tmp_path / "work")
    assert outcome.is_complete
    assert (outcome.num_records, outcome.num_failed, outcome.num_open) == (25, 0, 0)
    found = completions(tmp_path / "batch")
    assert sorted(one.id or "" for one in found) == sorted(f"q-{number}" for number in range(25))
    assert {len(one.output_token_ids or ()) for one in found} == {one.output_tokens for one in found} == {11}
    success = json.loads((tmp_path / "batch" / "_SUCCESS").read_text())
    assert (success["num_records"], success["num_failed"], len(success["parts"])) == (25, 0, 3)
    assert stub.seen == {f"question {number}": 1 for number in range(25)}
    assert (tmp_path / "batch" / "part-00003.jsonl").read_bytes() == b"", "the end of the log"


def test_faults_lose_and_repeat_nothing(tmp_path: Path, make_run: MakeRun) -> None:
    faults = {name: 3 * share for name, share in FAULTS.items()}
    with serving(Stub(faults)) as stub:
        outcome = generate(make_run(stub, 150, request_timeout_s=1, max_attempts=20), tmp_path / "work")
    assert outcome.is_complete
    assert outcome.num_failed == 0
    assert sorted(one.id or "" for one in completions(tmp_path / "batch")) == sorted(f"q-{n}" for n in range(150))
    assert all(stub.faulted[name] for name in ("reset", "busy", "truncated"))
    assert outcome.tries == 150 + sum(outcome.kinds.values())
    assert outcome.kinds["too_many_requests"] == stub.faulted["busy"]


def test_odd_answers_are_asked_again_and_poison_nothing(tmp_path: Path, make_run: MakeRun) -> None:
    odd: list[dict[str, Any]] = [
        {"usage": {"completion_tokens": 11, "prompt_tokens": "many"}},
        {"usage": {"completion_tokens": -3}},
        {"usage": {"completion_tokens": 10**30}},
        {"choices": [{"message": {"content": "\ud83d"}, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": "a", "tool_calls": [{}]}, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [0.5]}]},
        {"choices": {}},
    ]

    def oddly(request: dict[str, Any]) -> dict[str, Any]:
        number = int(request["messages"][-1]["content"].split()[-1])
        first = number < len(odd) and stub.seen[f"question {number}"] == 1
        return answer(request) | (odd[number] if first else {})

    with serving(Stub(answer=oddly)) as stub:
        outcome = generate(make_run(stub, 12), tmp_path / "work")
    assert (outcome.is_complete, outcome.num_failed) == (True, 0)
    assert outcome.kinds == {"bad_reply": 4, "broken_json": 1, "unusable_bad_field": 2}
    assert len(completions(tmp_path / "batch")) == 12


@pytest.mark.parametrize(
    "value", [{"chat_template_kwargs": {"a": float("nan")}}, {"tools": ({"maximum": float("inf")},)}]
)
def test_parameters_that_no_request_can_hold_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="expected finite numbers"):
        GenerateRun(prompts="p", batch="b", endpoints=("http://a",), **value)


@pytest.mark.parametrize(
    "url",
    [
        "http://a b/v1",
        "http://a:99999/v1",
        "http://a:0/v1",
        "http://a:b/v1",
        "http://a\\b",
        "http://a/v1\n",
        "a:80",
        "u:hidden@a",
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(ValidationError, match=r"(?i)address|port") as refused:
        GenerateRun(prompts="p", batch="b", endpoints=("http://[::1]:8000/v1", url))
    assert "hidden" not in problems_of(refused.value)


def test_failures_are_listed_and_done_again(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub(answer=aborting("question 3"))) as stub:
        run = make_run(stub, 10, max_attempts=2)
        with pytest.raises(DatasetError, match=r"1 of 10 prompts failed .*'aborted': 2"):
            generate(run, tmp_path / "work")
        assert not (tmp_path / "batch" / "_SUCCESS").exists()
        (listed,) = (tmp_path / "batch" / "_failures").glob("*.ndjson")
        assert json.loads(listed.read_text())["failure"]["kind"] == "aborted"
        stub.answer = answer
        stub.seen.clear()
        outcome = generate(run.model_copy(update={"only_failed": True}), tmp_path / "work")
        assert outcome.is_complete
        assert stub.seen == {"question 3": 1}
    assert len(completions(tmp_path / "batch")) == 10


def test_a_few_failures_are_allowed_when_asked_for(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub(answer=aborting("question 3"))) as stub:
        run = make_run(stub, 10, max_attempts=1, max_failed_share=0.1)
        outcome = generate(run, tmp_path / "work")
        assert outcome.is_complete
        assert outcome.failed_share == 0.1
        # What failed can be asked in a batch of its own, with its list as the prompts.
        again = run.model_copy(update={"prompts": outcome.failures, "batch": str(tmp_path / "again")})
        stub.answer = answer
        assert generate(again, tmp_path / "work").num_new == 1
        with pytest.raises(UsageError, match="is complete, and 1 of 10 prompts have no record"):
            generate(run, tmp_path / "work")


def test_order_and_number_of_prompts_may_change_between_runs(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub(answer=aborting("question 7"))) as stub:
        run = make_run(stub, 12, max_attempts=1)
        with pytest.raises(DatasetError, match="1 of 12 prompts failed"):
            generate(run, tmp_path / "work")
        stub.answer = answer
        write_prompts(Path(run.prompts), [prompt(number) for number in reversed(range(20))])
        stub.seen.clear()
        assert generate(run, tmp_path / "other-work").num_records == 20
        assert stub.seen == {f"question {number}": 1 for number in (7, *range(12, 20))}
    assert sorted(one.id or "" for one in completions(tmp_path / "batch")) == sorted(f"q-{n}" for n in range(20))


def test_the_number_of_done_prompts_never_falls_back(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are done while their part is still on its way to a slow store, and so are those of earlier runs."""

    class Slow(FaultPlan):
        def run(self, call: str, operation: Callable[[], Any]) -> Any:
            time.sleep(0.7 if call.startswith("put_if_absent part") else 0)
            return operation()

    seen: list[GenerateProgress] = []
    with serving(Stub(answer=aborting("question 24"))) as stub:
        run = make_run(stub, 25, max_attempts=1)
        with pytest.raises(DatasetError, match="1 of 25"):
            generate(run, tmp_path / "work")
        stub.answer, stub.slots, stub.service_s = answer, 2, 0.12
        write_prompts(Path(run.prompts), [prompt(number) for number in range(44)])
        monkeypatch.setattr(session_module, "open_store", lambda uri, *_: FaultStore(open_store(uri), Slow()))
        with GenerateSession(run, None, tmp_path / "work", listener=seen.append) as session:
            session.plan()
            session.generate()
    counts = [(one.num_done, one.num_new) for one in seen if one.step == "generating"]
    assert len(counts) > 2
    assert counts[-1] == (44, 20)
    assert {done - new for done, new in counts} == {24}


def test_hundreds_are_in_flight_and_never_more_than_allowed(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub(slots=1000, service_s=1.0)) as stub:
        outcome = generate(make_run(stub, 400, max_in_flight=200, part_records=500), tmp_path / "work")
    assert outcome.num_records == 400
    assert 128 < stub.max_active <= 200, "64 at first, twice as many after each window"


def test_the_key_is_sent_and_kept_nowhere(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        generate(make_run(stub, 2), tmp_path / "work", api_key="sk-hidden")
        assert all(b"Authorization: Bearer sk-hidden" in head for head in stub.headers)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sk-hidden" in path.read_bytes()]


def test_a_tokenizer_tells_that_cut_text_is_a_trace(
    tmp_path: Path, make_run: MakeRun, smollm2_tokenizer_dir: Path
) -> None:
    folder = tmp_path / "thinking"
    shutil.copytree(smollm2_tokenizer_dir, folder)
    template = folder / "chat_template.jinja"
    opened = "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
    template.write_text(template.read_text() + opened)
    with serving(Stub(answer=lambda request: answer(request, finish_reason="length"))) as stub:
        generate(make_run(stub, 2, tokenizer=str(folder)), tmp_path / "work")
    for record in records(tmp_path / "batch"):
        assert record["thinking_truncated"]
        assert record["messages"][-1]["content"] is None
        assert record["messages"][-1]["reasoning_content"].startswith("You said: question")


def test_a_batch_that_stands_still_is_not_taken_for_complete(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        generate(make_run(stub, 3), tmp_path / "batches" / "work")
    (tmp_path / "batch").rename(tmp_path / "batches" / "one")
    refresh = RefreshRun(
        merge=MergeRun(batch=TokenizeRun(source=str(tmp_path / "batches"), dataset=str(tmp_path / "d"), tokenizer="t")),
        quiet_s=0,
        skip=("work",),
    )

    def state() -> str:
        found = find_batches(open_store(str(tmp_path / "batches")), DatasetRoot.open(str(tmp_path / "d")), refresh, 2e9)
        return next(batch.state for batch in found if batch.name == "one")

    assert state() == "ready"
    (tmp_path / "batches" / "one" / "_SUCCESS").unlink()
    assert state() == "open"


def test_a_second_try_in_one_session_lists_its_own_failures(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub(answer=aborting("question 1"))) as stub:
        run = make_run(stub, 3, max_attempts=1)
        with GenerateSession(run, None, tmp_path / "work") as session:
            session.plan()
            first, second = session.generate(), session.generate()
        assert (first.num_new, first.num_failed, second.num_new, second.num_failed) == (2, 1, 0, 1)
        assert second.failures is not None
        assert len(Path(second.failures).read_text().splitlines()) == 1
        stub.answer = answer
        assert generate(run.model_copy(update={"only_failed": True}), tmp_path / "work").is_complete
