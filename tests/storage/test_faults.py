"""The fault store strikes at the planned call and nowhere else."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from typing import Literal

import pytest

from dflash.errors import StorageError
from dflash.storage import Store, open_store
from tests.storage.faults import FaultPlan, FaultStore


def work(store: Store) -> None:
    store.put_if_absent("a", b"1")
    store.copy("a", store, "b", size=1)
    store.replace("c", b"2", if_match=None)
    store.delete(["b"])


def work_until_killed(root: str, plan: FaultPlan) -> None:
    work(FaultStore(open_store(root), plan))


def test_a_plan_without_faults_counts_calls(tmp_path: Path) -> None:
    plan = FaultPlan()
    work(FaultStore(open_store(str(tmp_path)), plan))
    assert plan.calls == ["put_if_absent a", "copy a b", "replace c", "delete b"]


@pytest.mark.parametrize(("when", "kept"), [("before", ["a"]), ("after", ["a", "b"])])
def test_a_fault_strikes_before_or_after_the_call(
    tmp_path: Path, when: Literal["before", "after"], kept: list[str]
) -> None:
    store = FaultStore(open_store(str(tmp_path)), FaultPlan(2, when))
    with pytest.raises(StorageError, match=f"planned fault {when} call 2: copy a b"):
        work(store)
    assert [info.key for info in store.list()] == kept


def test_a_kill_ends_the_process(tmp_path: Path) -> None:
    plan = FaultPlan(3, "after", "kill")
    process = multiprocessing.get_context("spawn").Process(target=work_until_killed, args=(str(tmp_path), plan))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [info.key for info in open_store(str(tmp_path)).list()] == ["a", "b", "c"]
