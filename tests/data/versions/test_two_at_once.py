"""Two refreshes of one dataset, stopped between any two steps: each batch is merged once, and nobody fails."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from dflash.config import TokenizeRun
from dflash.data.backup import backup_version
from dflash.data.dataset import DatasetRoot
from dflash.data.tokenize_run import TokenizeSession
from dflash.data.verify import verify_dataset
from dflash.data.workspace import Workspace
from dflash.errors import PublishConflictError
from embedded.seaweedfs import SeaweedServer
from tests.data.crash_cases import Place
from tests.data.small_roots import Small
from tests.storage.faults import Faster, FaultPlan, T, WatchedStore

BATCHES = (0, 10)  # the first becomes version 1
PLAN_ATTEMPTS = 3
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def every_look_at_the_clock_is_a_second_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two runs over one batch never make the very same manifest or move."""
    seconds = itertools.count()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime(2026, 11, 30, tzinfo=tz or UTC) + timedelta(seconds=next(seconds))

    monkeypatch.setattr("dflash.data.merge.datetime", Clock)
    monkeypatch.setattr("dflash.data.dataset.datetime", Clock)


@dataclass(slots=True)
class Stop(FaultPlan):
    """Waits before the call that is due until it may go on."""

    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, call: str, operation: Callable[[], T]) -> T:
        with self.lock:
            self.calls.append(call)
            is_due = len(self.calls) == self.at
        if is_due:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        return operation()


class Refresh:
    """What the refresh flow does with each batch: plan, put in place, back up, publish; again after a lost race."""

    def __init__(self, place: Place, name: str, stop: Stop) -> None:
        small, mirror = place.open(stop, WatchedStore)
        self.small, self.mirror = Small(small.root, place.work / name), mirror
        self.stop = stop
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def run_until_stopped(self) -> None:
        self.thread.start()
        while self.thread.is_alive() and not self.stop.reached.wait(0.002):
            pass

    def finish(self) -> None:
        self.stop.go_on.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            for first in BATCHES:
                self._merge(first)
        except BaseException as error:  # noqa: BLE001 (raised again by `finish`)
            self.error = error

    def _merge(self, first: int) -> None:
        for attempt in range(1, PLAN_ATTEMPTS + 1):
            try:
                self.small.merge(first, before_publish=lambda it: backup_version(self.small.root, it, self.mirror))
            except PublishConflictError:
                if attempt == PLAN_ATTEMPTS:
                    raise
            else:
                return


def race(place: Place, first: int, second: int = 0) -> tuple[Stop, Stop]:
    """One runs up to a call, the other up to a call (0: to its end), then the first to its end, then the other."""
    stops = Stop(first), Stop(second)
    runs = [Refresh(place, f"run-{number}", stop) for number, stop in enumerate(stops)]
    for run in runs:
        run.run_until_stopped()
    for run in runs:
        run.finish()
    return stops


def assert_merged_once(place: Place) -> None:
    small, mirror = place.open()
    manifest, pointer = small.root.manifest(), small.root.pointer()
    assert pointer is not None
    assert [move.version for move in pointer.record.history] == [1, 2]
    assert [batch.source for batch in manifest.batches] == [f"s3://completions/{first}" for first in BATCHES]
    assert manifest.counts.num_rows == sum(batch.num_rows for batch in manifest.batches)
    assert verify_dataset(small.root, manifest).problems == ()
    assert small.root.store.list_uploads() == ()
    assert mirror.current() == small.root.manifest(1)


def matters(call: str) -> bool:
    """Whether another run may decide the outcome here: pointer, manifests, and what is put in place."""
    action, _, key = call.partition(" ")
    return key.startswith(("state.json", "manifests/")) or action in {"copy", "delete"} or "dataset_info" in key


def numbers(place: Place) -> Iterator[tuple[int, str]]:
    """All calls of one run alone."""
    (stop, _) = race(place, 0)
    yield from enumerate(stop.calls, 1)


def local(folder: Path) -> Place:
    return Place(str(folder), folder / "work")


def test_one_is_stopped_anywhere_while_the_other_runs(tmp_path: Path) -> None:
    calls = list(numbers(local(tmp_path / "alone")))
    assert sum("state.json" in call for _, call in calls) >= 6
    for number, _ in calls:
        place = local(tmp_path / f"{number}")
        race(place, number)
        assert_merged_once(place)


@pytest.mark.slow
def test_both_are_stopped_before_what_they_write(tmp_path: Path) -> None:
    looks = ("list", "head", "read", "download")
    calls = [(number, call) for number, call in numbers(local(tmp_path / "alone")) if matters(call)]
    points = [number for number, call in calls if not call.startswith(looks)]
    assert len(points) >= 9
    for first, second in itertools.product(points, points):
        place = local(tmp_path / f"{first}-{second}")
        race(place, first, second)
        assert_merged_once(place)


def test_one_is_stopped_wherever_it_matters_on_a_server(s3_server: SeaweedServer, tmp_path: Path) -> None:
    place = Place(f"{s3_server.uri}/{uuid.uuid4().hex}", tmp_path / "work", s3_server.credentials)
    points = [number for number, call in numbers(place) if matters(call)]
    assert len(points) >= 20
    for number in points:
        place.empty()
        race(place, number)
        assert_merged_once(place)


def test_a_slow_run_does_not_make_an_old_version_the_newest_backup(tmp_path: Path) -> None:
    """It planned on version 1 and records its backup when versions 2 and 3 are there."""
    place = local(tmp_path)
    small, mirror = place.open()
    old = small.merge(0)
    backup_version(small.root, old, mirror)
    second = small.merge(10)
    backup_version(small.root, second, mirror)
    small.merge(20)
    backup_version(small.root, old, mirror)
    assert mirror.current() == second
    rolled_back: DatasetRoot = small.root
    rolled_back.publish(old, rolled_back.pointer(), "rollback")
    backup_version(rolled_back, old, mirror)
    assert mirror.current() == old


def test_a_batch_that_another_run_just_published_as_version_1_is_found(
    tmp_path: Path, smollm2_tokenizer_dir: Path
) -> None:
    run = TokenizeRun(
        source=str(tmp_path / "completions"), dataset=str(tmp_path / "train"), tokenizer=str(smollm2_tokenizer_dir)
    )
    small, _ = local(tmp_path).open()
    batch, other = [small.put_shard(0)], [small.put_shard(50)]
    with TokenizeSession(run, None, Workspace(tmp_path / "work", tmp_path / "cache")) as session:
        store, report = session.root.store, session.assess(batch)
        first, theirs = session.first_manifest(batch, report), session.first_manifest(other, report)
        for manifest in (theirs, first):
            plan = Faster(lambda it=manifest: small.root.publish(it, expected=None))  # type: ignore[misc]
            session.root = DatasetRoot(run.dataset, WatchedStore(store, plan), session.root.meta, session.root.cache)
            if manifest is first:
                found = session.publish_first(batch, report)
                assert found == small.root.current()
                assert found.name == first.name
            else:
                with pytest.raises(PublishConflictError, match="another publisher won"):
                    session.publish_first(batch, report)
                small.root.store.delete(["state.json"])
