"""A batch holds what was asked: changed requests, damaged parts, and writers that come too late."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflash.generate.session as session_module
from dflash.errors import DamagedDatasetError, DatasetError, UsageError
from dflash.generate.config import GenerateRun, SamplingOptions
from dflash.generate.parts import BatchLog
from dflash.storage import Store, open_store
from tests.generate.conftest import MakeRun, generate, prompt, records, write_prompts
from tests.generate.stub_server import Stub, answer, serving, unused_url
from tests.storage.faults import FaultPlan, FaultStore

CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "another question"}]}, {}, r"'q-1' differs in: messages\."),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {}, r"'q-1' differs in: tools\."),
    ({"sampling": {"temperature": 0.5}}, {}, r"differs in: sampling.temperature \(1.0 then, 0.5 now\)\."),
    ({"chat_template_kwargs": {"a": 1}}, {}, r"differs in: template arguments\."),
    ({}, {"sampling": SamplingOptions(seed=9)}, r"3 of 3 prompts .*'q-0', 'q-1', 'q-2'\.\n.*differs in: sampling.seed"),
    ({}, {"sampling": SamplingOptions(seed=None)}, r"differs in: sampling.seed \(\d+ then, None now\)"),
    ({}, {"model": "other"}, r"differs in: model \('stub' then, 'other' now\)\."),
    ({}, {"thinking": True}, r"differs in: template arguments\."),
]


CASES = [("complete", *case) for case in CHANGES] + [
    (state, *CHANGES[n]) for state in ("begun", "spooled") for n in (0, 4)
]


@pytest.mark.parametrize(("state", "fields", "settings", "message"), CASES)
def test_another_request_under_a_known_id_is_refused(
    tmp_path: Path, make_run: MakeRun, state: str, fields: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, 3)
        generate(run, tmp_path / "work")
        batch = tmp_path / "batch"
        if state != "complete":
            for key in ("_SUCCESS", "part-00001.jsonl"):
                (batch / key).unlink()
        if state == "spooled":
            (spool,) = (tmp_path / "work").glob("generate-*")
            (batch / "part-00000.jsonl").rename(spool / "open.jsonl")
        if state != "begun":  # nothing is left to ask, so that no server is needed
            run = run.model_copy(update={"endpoints": (unused_url(),)})
        number = 4 if state == "begun" else 3
        write_prompts(Path(run.prompts), [prompt(n, **fields) if n == 1 else prompt(n) for n in range(number)])
        stub.seen.clear()
        with pytest.raises(UsageError, match=message.replace("of 3", f"of {number}")) as error:
            generate(run.model_copy(update=settings), tmp_path / "work")
        assert not stub.seen, "nothing is asked when the batch can't be used"
    assert "or generate into a new folder" in str(error.value)


def test_the_same_request_is_no_change_and_needs_no_server(tmp_path: Path, make_run: MakeRun) -> None:
    def empty_at_first(request: dict[str, Any]) -> dict[str, Any]:
        text = "" if stub.seen["question 1"] < 2 and "question 1" in str(request) else "Yes."
        return answer(request, message={"role": "assistant", "content": text})

    with serving(Stub(answer=empty_at_first)) as stub:
        run = make_run(stub, 3)
        generate(run, tmp_path / "work")
        assert stub.seen["question 1"] == 2
    asked_again = next(record for record in records(tmp_path / "batch") if record["id"] == "q-1")
    assert asked_again["attempts"] == 2
    unreachable = run.model_copy(update={"endpoints": (unused_url(),)})
    assert generate(unreachable, tmp_path / "work").num_new == 0
    # Its seed is that of the second try: no difference of its own.
    other = unreachable.model_copy(update={"sampling": SamplingOptions(top_k=7)})
    write_prompts(Path(run.prompts), [prompt(1)])
    with pytest.raises(UsageError, match=r"'q-1' differs in: sampling.top_k \(None then, 7 now\)\."):
        generate(other, tmp_path / "work")


def damage(path: Path) -> None:
    """Other bytes of the same size and still JSON."""
    data = path.read_bytes()
    assert b"You said" in data
    path.write_bytes(data.replace(b"You said", b"He said?", 1))


def test_a_damaged_part_of_the_same_size_completes_no_batch(tmp_path: Path, make_run: MakeRun) -> None:
    def stubborn(request: dict[str, Any]) -> dict[str, Any]:
        return answer(request, finish_reason="abort" if "question 24" in str(request["messages"]) else "stop")

    with serving(Stub(answer=stubborn)) as stub:
        run = make_run(stub, 25, max_attempts=1)
        with pytest.raises(DatasetError, match="1 of 25 prompts failed"):
            generate(run, tmp_path / "work")
        part = tmp_path / "batch" / "part-00001.jsonl"
        damage(part)
        stub.answer = answer
        with pytest.raises(DamagedDatasetError, match=r"1 of 4 parts .*SHA-256.*: part-00001\.jsonl\. Put them back"):
            generate(run, tmp_path / "work")
        assert not (tmp_path / "batch" / "_SUCCESS").exists()
        # What the message says to do.
        part.unlink()
        (tmp_path / "batch" / "_parts" / "part-00001.json").unlink()
        stub.seen.clear()
        assert generate(run, tmp_path / "work").num_new == 10
        assert max(stub.seen.values()) == 1
    assert sorted(record["id"] for record in records(tmp_path / "batch")) == sorted(f"q-{n}" for n in range(25))
    assert all(record["messages"][-1]["content"].startswith("You") for record in records(tmp_path / "batch"))


def test_a_spot_check_finds_a_damaged_part(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        generate(make_run(stub, 12), tmp_path / "work")
    log = BatchLog(open_store(str(tmp_path / "batch")))
    log.load()
    log.verify()
    damage(tmp_path / "batch" / "part-00001.jsonl")
    log = BatchLog(open_store(str(tmp_path / "batch")))
    log.load()
    with pytest.raises(DamagedDatasetError, match=r"1 of 2 parts .*part-00001\.jsonl"):
        log.verify()


class Interrupted(FaultPlan):
    """Somebody else acts once, right before a call takes effect."""

    def __init__(self, call: str, act: Callable[[], object]) -> None:
        super().__init__()
        self.call = call
        self.act: Callable[[], object] | None = act

    def run(self, call: str, operation: Callable[[], Any]) -> Any:
        act, self.act = (self.act, None) if call == self.call else (None, self.act)
        if act is not None:
            act()
        return operation()


def interrupt(monkeypatch: pytest.MonkeyPatch, call: str, act: Callable[[], object]) -> None:
    """Only the next session that is opened meets the other writer."""
    plan, real = Interrupted(call, act), open_store

    def opened(uri: str, *_: object) -> Store:
        monkeypatch.setattr(session_module, "open_store", real)
        return FaultStore(real(uri), plan)

    monkeypatch.setattr(session_module, "open_store", opened)


def success(batch: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((batch / "_SUCCESS").read_text())
    assert [part["part"] for part in found["parts"]] == sorted(
        path.name for path in batch.glob("part-*.jsonl") if path.stat().st_size
    ), "the parts are those that it lists"
    assert found["num_records"] == sum(part["num_records"] for part in found["parts"]) == len(records(batch))
    return found


def of_fewer(run: GenerateRun, tmp_path: Path, num_prompts: int) -> GenerateRun:
    path = write_prompts(tmp_path / "fewer.jsonl", [prompt(number) for number in range(num_prompts)])
    return run.model_copy(update={"prompts": str(path)})


def add_parts(monkeypatch: pytest.MonkeyPatch, run: GenerateRun, work: Path) -> None:
    """A run that stops before it closes the batch."""
    with monkeypatch.context() as patched, session_module.GenerateSession(run, None, work) as session:
        patched.setattr(BatchLog, "close", lambda _: None)
        session.plan()
        session.generate()


@pytest.mark.parametrize("call", ["put_if_absent part-00000.jsonl", "put_if_absent part-00001.jsonl"])
def test_no_part_is_added_behind_success(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A run of more prompts has looked for `_SUCCESS` and is about to put a part when another run completes."""
    with serving(Stub()) as stub:
        run = make_run(stub, 25, model="stub")
        fewer = of_fewer(run, tmp_path, 5)
        interrupt(monkeypatch, call, lambda: generate(fewer, tmp_path / "other"))
        with pytest.raises(UsageError, match=r"completed by another run, without \d+ records that wait in"):
            generate(run, tmp_path / "work")
        found = success(tmp_path / "batch")
        assert found["num_prompts"] == 5
        with pytest.raises(UsageError, match="completed by another run"):
            generate(run, tmp_path / "work")
    assert success(tmp_path / "batch") == found


def test_a_batch_that_another_run_completed_is_no_success_without_the_own_prompts(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of this run's own prompts fail while a run of fewer completes."""
    with serving(Stub(answer=lambda request: answer(request, finish_reason="abort"))) as stub, serving(Stub()) as good:
        run = make_run(stub, 25, model="stub", max_attempts=1)
        fewer = of_fewer(run, tmp_path, 5).model_copy(update={"endpoints": (good.url,)})
        interrupt(monkeypatch, "put_if_absent _failures/run-00000.ndjson", lambda: generate(fewer, tmp_path / "other"))
        with pytest.raises(UsageError, match=r"is complete, and 2\d of 25 prompts have no record in it"):
            generate(run, tmp_path / "work")
    assert success(tmp_path / "batch")["num_records"] == 5


def test_a_part_that_comes_before_the_end_belongs_to_the_batch(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has all its records and is about to close the batch when a slower one of more prompts adds a part."""
    with serving(Stub()) as stub:
        run = make_run(stub, 12, model="stub")
        fewer = of_fewer(run, tmp_path, 5)

        def add_a_part() -> None:
            add_parts(monkeypatch, run.model_copy(update={"part_records": 4}), tmp_path / "other")

        interrupt(monkeypatch, "put_if_absent part-00001.jsonl", add_a_part)
        outcome = generate(fewer, tmp_path / "work")
    assert (outcome.num_prompts, outcome.num_records) == (5, 12)
    assert success(tmp_path / "batch")["num_records"] == 12


def test_a_run_that_died_behind_the_end_is_finished_without_asking(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(request: dict[str, Any]) -> dict[str, Any]:
        return answer(request, finish_reason="abort" if "question 3" in str(request["messages"]) else "stop")

    with serving(Stub(answer=stubborn)) as stub:
        run = make_run(stub, 10, model="stub", max_attempts=1, max_failed_share=0.1)
        with session_module.GenerateSession(run, None, tmp_path / "work") as session:
            session.plan()
            session.generate()
        assert not (tmp_path / "batch" / "_SUCCESS").exists()
        stub.answer = answer
        stub.seen.clear()
        with pytest.raises(UsageError, match=r"is complete, and 1 of 10 prompts .* with .*run-00000\.ndjson"):
            generate(run.model_copy(update={"max_failed_share": 0.0}), tmp_path / "work")
        outcome = generate(run, tmp_path / "work")
        assert (outcome.is_complete, outcome.num_failed) == (True, 1)
        assert not stub.seen
    found = success(tmp_path / "batch")
    assert (found["num_failed"], found["num_records"]) == (1, 9)
    assert str(found["failures"]).endswith("_failures/run-00000.ndjson")


def test_a_prompt_that_another_run_answered_is_no_failure(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(request: dict[str, Any]) -> dict[str, Any]:
        return answer(request, finish_reason="abort" if "question 3" in str(request["messages"]) else "stop")

    with serving(Stub(answer=stubborn)) as stub, serving(Stub()) as good:
        run = make_run(stub, 10, model="stub", max_attempts=1)
        other = run.model_copy(update={"endpoints": (good.url,)})
        interrupt(monkeypatch, "put_if_absent part-00000.jsonl", lambda: generate(other, tmp_path / "other"))
        outcome = generate(run, tmp_path / "work")
    assert (outcome.is_complete, outcome.num_failed, outcome.num_open) == (True, 0, 0)
    assert success(tmp_path / "batch")["num_records"] == 10


def test_two_runs_with_other_parameters_complete_no_batch_together(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, 12, model="stub")
        fewer = of_fewer(run, tmp_path, 5).model_copy(update={"sampling": SamplingOptions(temperature=0.5)})

        def add_a_part() -> None:
            add_parts(monkeypatch, fewer, tmp_path / "other")

        interrupt(monkeypatch, "put_if_absent part-00000.jsonl", add_a_part)
        with pytest.raises(
            UsageError, match=r"5 of 12 prompts .*asked otherwise(?s:.*)temperature \(0.5 then, 1.0 now"
        ):
            generate(run, tmp_path / "work")
    assert not (tmp_path / "batch" / "_SUCCESS").exists()


def test_a_part_behind_the_end_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        generate(make_run(stub, 3), tmp_path / "work")
    (tmp_path / "batch" / "part-00002.jsonl").write_text("")
    with pytest.raises(DamagedDatasetError, match=r"part-00002\.jsonl lies behind an empty part"):
        BatchLog(open_store(str(tmp_path / "batch"))).load()
