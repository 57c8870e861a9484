"""Which batch folders are merged, complete, open: on a real folder and a real root."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import MergeRun, RefreshRun, TokenizeRun
from dflash.data.discovery import BatchState, FoundBatch, find_batches, mergeable
from dflash.errors import IntegrityError
from dflash.storage import LocalStore, ObjectInfo, open_store
from tests.data.versions.named_batches import publish
from tests.storage.faults import FaultPlan, FaultStore

NOW = 1_000_000.0
Write = Callable[..., None]


@pytest.fixture
def completions(tmp_path: Path) -> LocalStore:
    store = open_store(str(tmp_path / "completions"))
    assert isinstance(store, LocalStore)
    return store


@pytest.fixture
def write(completions: LocalStore) -> Write:
    def write_file(key: str, age_s: float = 0, data: bytes = b"{}\n") -> None:
        path = completions.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (NOW - age_s, NOW - age_s))

    return write_file


def make_run(completions: LocalStore, **values: Any) -> RefreshRun:
    batch = TokenizeRun(source=completions.uri, dataset="train", tokenizer="t")
    return RefreshRun(merge=MergeRun(batch=batch), **values)


def states(found: list[FoundBatch]) -> dict[str, str]:
    return {batch.name: batch.state for batch in found}


def test_success_or_quiet_makes_a_batch_complete(completions: LocalStore, write: Write, sandbox: Any) -> None:
    write("a/part-0.jsonl")
    write("a/_SUCCESS")
    write("b/part-0.jsonl", age_s=601)
    write("c/part-0.jsonl", age_s=5_000)
    write("c/deep/part-1.jsonl.gz", age_s=599)
    write("d/_SUCCESS")
    write("loose.jsonl", age_s=5_000)
    found = find_batches(completions, sandbox.root, make_run(completions, quiet_s=600), NOW)
    assert states(found) == {"a": "ready", "b": "ready", "c": "open", "d": "empty"}
    assert "599 s ago" in found[2].why
    only_success = find_batches(completions, sandbox.root, make_run(completions, quiet_s=None), NOW)
    assert states(only_success) == {"a": "ready", "b": "open", "c": "open", "d": "empty"}


def test_what_any_version_names_is_merged_also_after_a_rollback(
    completions: LocalStore, write: Write, sandbox: Any, sample: Any
) -> None:
    for name in ("a", "b", "c"):
        write(f"{name}/part-0.jsonl")
        write(f"{name}/_SUCCESS")
    publish(sandbox, sample, completions, "a", 0)
    publish(sandbox, sample, completions, "b", 100)
    first = sandbox.root.manifest(1)
    sandbox.root.publish(first, expected=sandbox.root.pointer(), action="rollback")
    assert sandbox.root.current() == first
    found = find_batches(completions, sandbox.root, make_run(completions), NOW)
    assert states(found) == {"a": "merged", "b": "merged", "c": "ready"}


@pytest.mark.parametrize(("action", "needed"), [("rollback", [2, 4]), ("restore", [1, 2, 4])])
def test_versions_that_a_later_one_contains_are_not_read(
    completions: LocalStore,
    write: Write,
    sandbox: Any,
    sample: Any,
    monkeypatch: pytest.MonkeyPatch,
    action: Any,
    needed: list[int],
) -> None:
    names = ("a", "b", "c", "d")
    for number, name in enumerate(names):
        write(f"{name}/part-0.jsonl")
        publish(sandbox, sample, completions, name, 100 * number)
        if name == "b":  # goes on from the first
            sandbox.root.publish(sandbox.root.manifest(1), expected=sandbox.root.pointer(), action=action)
    read: list[Any] = []
    whole = sandbox.root.manifest

    def manifest(version: Any) -> Any:
        read.append(version)
        return whole(version)

    monkeypatch.setattr(sandbox.root, "manifest", manifest)
    found = find_batches(completions, sandbox.root, make_run(completions), NOW)
    assert states(found) == dict.fromkeys(names, "merged")
    assert [whole(version).version for version in read] == needed


def test_late_files_are_told_and_not_merged(completions: LocalStore, write: Write, sandbox: Any, sample: Any) -> None:
    write("a/part-0.jsonl")
    write("a/part-1.jsonl")
    publish(sandbox, sample, completions, "a", 0)
    (completions.root / "a" / "part-0.jsonl").unlink()  # cleaned up: nothing new in that
    assert states(find_batches(completions, sandbox.root, make_run(completions), NOW)) == {"a": "merged"}
    write("a/part-2.jsonl", data=b"{ }\n")
    (batch,) = find_batches(completions, sandbox.root, make_run(completions), NOW)
    assert (batch.state, "part-2.jsonl" in batch.why) == ("changed", True)
    assert mergeable([batch]) == []


def test_a_batch_is_left_out_on_request(completions: LocalStore, write: Write, sandbox: Any) -> None:
    write("a/part-0.jsonl", age_s=9_000)
    write("b/part-0.jsonl", age_s=9_000)
    found = find_batches(completions, sandbox.root, make_run(completions, skip=("a",)), NOW)
    assert [batch.name for batch in mergeable(found)] == ["b"]


def test_a_busy_batch_is_open_and_keeps_none_before_it_waiting(
    completions: LocalStore, write: Write, sandbox: Any
) -> None:
    class BusyStore(FaultStore):
        def list(self, prefix: str = "") -> list[ObjectInfo]:
            if prefix == "b":
                raise IntegrityError("two listings differ")
            return self.inner.list(prefix)

    for name in ("a", "b", "c"):
        write(f"{name}/part-0.jsonl", age_s=9_000)
    found = find_batches(BusyStore(completions, FaultPlan()), sandbox.root, make_run(completions), NOW)
    assert states(found) == {"a": "ready", "b": "open", "c": "ready"}
    assert [batch.name for batch in mergeable(found)] == ["a"]
    assert found[1].why == "it can't be listed: two listings differ"
    skipped = find_batches(BusyStore(completions, FaultPlan()), sandbox.root, make_run(completions, skip=("b",)), NOW)
    assert [batch.name for batch in mergeable(skipped)] == ["a", "c"]


def test_an_empty_or_missing_folder_holds_no_batch(completions: LocalStore, sandbox: Any) -> None:
    assert find_batches(completions, sandbox.root, make_run(completions), NOW) == []


STATES: tuple[BatchState, ...] = ("merged", "changed", "ready", "open", "empty", "skipped")


@given(st.lists(st.sampled_from(STATES), max_size=8))
def test_nothing_behind_an_open_batch_is_merged(kinds: list[BatchState]) -> None:
    found = [FoundBatch(f"{number}", state, 1, 1, "") for number, state in enumerate(kinds)]
    first_open = kinds.index("open") if "open" in kinds else len(kinds)
    expected = [number for number, state in enumerate(kinds[:first_open]) if state == "ready"]
    assert [int(batch.name) for batch in mergeable(found)] == expected


def test_the_merge_of_a_batch_differs_in_its_source_alone(completions: LocalStore) -> None:
    run = make_run(completions)
    merge = run.merge_of("b7")
    assert merge.batch.source == f"{completions.uri}/b7"
    back = merge.batch.model_copy(update={"source": completions.uri})
    assert merge.model_copy(update={"batch": back}) == run.merge
