"""Two trainers and one output: the living one keeps it, a silent one loses it, and hears of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash.data.copying import mark_of
from dflash.errors import StorageError, TrainingError
from dflash.storage import LocalStore
from dflash.train import output_lease
from dflash.train.output_lease import LEASE, LeaseTimes, OutputLease, hold_output, place_of
from tests.storage.faults import FaultPlan, FaultStore

NEVER = 1000.0


def times(**changes: float) -> LeaseTimes:
    return LeaseTimes(**{"wait_s": NEVER, "renew_s": NEVER, "stale_s": NEVER, "poll_s": 0.01} | changes)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "output"))


def content(store: LocalStore) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.read(LEASE))
    return found


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_after_the_other_waits_for_nothing(store: LocalStore) -> None:
    for place in ("a", "b"):
        with hold_output(store, place, times()):
            assert (content(store)["place"], content(store)["released"]) == (place, False)
        assert content(store)["released"]


def test_a_trainer_that_lives_elsewhere_keeps_its_output(store: LocalStore) -> None:
    with (
        hold_output(store, "a", times(renew_s=0.02)) as lease,
        pytest.raises(TrainingError, match=r"works on .*output, and has done so for \d+ s"),
        hold_output(store, "b", times(stale_s=10, wait_s=0.2)),
    ):
        pytest.fail("two at a time")
    assert not lease.lost


def test_the_end_of_the_other_is_waited_for(store: LocalStore) -> None:
    ended = threading.Event()

    def hold() -> None:
        with hold_output(store, "a", times(renew_s=0.02)):
            ended.wait(20)

    other = threading.Thread(target=hold)
    other.start()
    wait_for(store.list)
    threading.Timer(0.2, ended.set).start()
    with hold_output(store, "b", times(stale_s=10)):
        assert ended.is_set()
    other.join()


def test_one_that_is_silent_loses_it_and_writes_nothing_more(store: LocalStore) -> None:
    with hold_output(store, "a", times()) as lease:
        with hold_output(store, "b", times(stale_s=0.1)):
            with pytest.raises(TrainingError, match=r"Another trainer .* has taken over .*output"):
                lease.renew()
            assert lease.lost
        after = content(store)
    assert content(store) == after  # it releases no lease of another's


def test_one_that_renews_in_the_background_hears_that_it_has_lost(store: LocalStore) -> None:
    with hold_output(store, "a", times(renew_s=0.02)) as lease:
        assert OutputLease(store, "b").take(mark_of(store, LEASE))
        wait_for(lambda: lease.lost)


def test_a_killed_trainer_of_this_very_folder_is_not_waited_for(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    place = place_of(tmp_path / "run")
    assert place_of(tmp_path / "run") == place
    (tmp_path / "other").mkdir()
    assert place_of(tmp_path / "other") != place
    assert OutputLease(store, place).take(None)
    with hold_output(store, place, times()):
        pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_renewal_that_is_lost_or_whose_answer_is_costs_nothing(store: LocalStore, when: Any) -> None:
    plan = FaultPlan(2, when)
    with hold_output(FaultStore(store, plan), "a", times()) as lease:
        with pytest.raises(StorageError, match="planned fault"):
            lease.renew()
        lease.renew()
        assert not lease.lost
    assert content(store)["released"]


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"[1]", b'{"place": 1, "released": 1}'])
def test_a_lease_that_nobody_understands_is_waited_for_like_any(store: LocalStore, data: bytes) -> None:
    store.replace(LEASE, data, if_match=None)
    started = time.monotonic()
    with hold_output(store, "a", times(stale_s=0.2)):
        assert time.monotonic() - started >= 0.2


def test_of_two_that_come_together_one_gets_it(store: LocalStore) -> None:
    mark, _ = output_lease._look(store)
    assert [OutputLease(store, place).take(mark) for place in ("a", "b")] == [True, False]


def test_a_store_that_is_away_for_a_while_is_asked_again(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan(2)
    with hold_output(FaultStore(store, plan), "a", times(renew_s=0.02)) as lease:
        wait_for(lambda: len(plan.calls) > 3)
        assert not lease.lost
    assert "couldn't be renewed: planned fault" in caplog.text
