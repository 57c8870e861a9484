"""Killed before and after every write: the old or the new version loads whole, a rerun finishes, nothing is lost."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from datasets import load_from_disk

from dflash.data.backup import backup_version, rollback
from dflash.data.dataset import DatasetRoot
from dflash.data.merge import merge_manifest, publish_merge, write_shards
from dflash.data.merge_plan import MergePlan
from dflash.data.shard_files import ShardFiles
from dflash.data.verify import verify_dataset
from dflash.errors import PublishConflictError
from dflash.manifest import Manifest
from embedded.seaweedfs import SeaweedServer
from tests.data.crash_cases import CASES, Death, Killed, Place, act
from tests.data.small_roots import Small
from tests.storage.faults import FaultPlan

When = Literal["before", "after"]
MAX_POINTS = 200


def points() -> Iterator[tuple[int, When]]:
    for number in range(1, MAX_POINTS):
        for when in ("before", "after"):
            yield number, when  # type: ignore[misc]


def is_killed(case: str, place: Place, plan: FaultPlan) -> bool:
    try:
        act(case, place, plan)
    except Killed:
        return True
    return False


def assert_loads(root: DatasetRoot, number: int) -> None:
    """The version is current, and every row of it is what the manifest says."""
    manifest = root.current()
    assert (manifest.version if manifest is not None else 0) == number
    if manifest is not None:
        assert verify_dataset(root, manifest).problems == ()
        if root.store.local_path("state.json") is not None:
            assert load_from_disk(root.uri).num_rows == manifest.counts.num_rows


def assert_nothing_lost(root: DatasetRoot, mirror: DatasetRoot) -> None:
    """Every shard of every version that was ever published is in the root or in the mirror."""
    pointer = root.pointer()
    for move in pointer.record.history if pointer is not None else ():
        manifest = root.manifest(move.manifest)
        assert mirror.missing_shards(root.missing_shards(manifest.shards)) == []


def assert_survived(case: str, place: Place) -> None:
    """What must hold after a kill, after the rerun, and after going back to the first version."""
    _, _, before, after = CASES[case]
    small, mirror = place.open()
    if case != "restore":
        current = small.root.current()
        number = 0 if current is None else current.version
        assert number in {before, after}
        assert_loads(small.root, number)
        assert_nothing_lost(small.root, mirror)
    backed_up = mirror.current()
    if backed_up is not None:
        assert_loads(mirror, backed_up.version)
    act(case, place)
    assert_loads(small.root, after)
    if place.credentials is None:  # a case of its own on a server, where each look costs ten times as much
        rollback(small.root, 1, mirror)
        assert_loads(small.root, 1)
    assert small.root.store.list_uploads() == mirror.store.list_uploads() == ()


@pytest.mark.parametrize("case", CASES)
def test_a_kill_at_every_write_leaves_a_whole_dataset(case: str, tmp_path: Path) -> None:
    template = Place(str(tmp_path / "template"), tmp_path / "template" / "work")
    CASES[case][0](*template.open())
    num_points = 0
    for at, when in points():
        folder = tmp_path / f"{at}-{when}"
        shutil.copytree(template.uri, folder) if Path(template.uri).exists() else folder.mkdir()
        place = Place(str(folder), folder / "work")
        if not is_killed(case, place, Death(at, when)):
            break
        assert_survived(case, place)
        shutil.rmtree(folder)
        num_points += 1
    assert num_points >= 4
    assert num_points % 2 == 0


@pytest.mark.parametrize("case", CASES)
def test_a_kill_after_every_write_to_a_server_leaves_a_whole_dataset(
    case: str, s3_server: SeaweedServer, tmp_path: Path
) -> None:
    """What lies there after one write lies there before the next: every state that a kill can leave."""
    place = Place(f"{s3_server.uri}/{uuid.uuid4().hex}", tmp_path / "work", s3_server.credentials)
    for at in range(1, MAX_POINTS):
        CASES[case][0](*place.open())
        plan = Death(at, "after")
        if not is_killed(case, place, plan):
            break
        assert_survived(case, place)
        place.empty()
    assert at - 1 == len(plan.calls) >= 3


def keys(place: Place) -> dict[str, list[str]]:
    small, mirror = place.open()
    stores = (small.root.store, small.root.meta, mirror.store, mirror.meta)
    return {store.uri.removeprefix(place.uri): [info.key for info in store.list()] for store in stores}


@pytest.mark.parametrize(
    ("case", "at", "when"), [("merge with backup", 9, "before"), ("backup", 6, "after"), ("gc", 9, "after")]
)
def test_a_real_kill_leaves_what_a_simulated_one_leaves(case: str, at: int, when: When, tmp_path: Path) -> None:
    found = []
    for name in ("simulated", "real"):
        place = Place(str(tmp_path / name), tmp_path / name / "work")
        CASES[case][0](*place.open())
        if name == "simulated":
            assert is_killed(case, place, Death(at, when))
        else:
            process = multiprocessing.get_context("spawn").Process(
                target=act, args=(case, place, FaultPlan(at, when, "kill"))
            )
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL
        found.append({store: [key for key in found if "clock/" not in key] for store, found in keys(place).items()})
        assert_survived(case, place)
    assert found[0] == found[1]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path), tmp_path / "work")
    server: SeaweedServer = request.getfixturevalue("s3_server")
    return Place(f"{server.uri}/{uuid.uuid4().hex}", tmp_path / "work", server.credentials)


class Merger:
    """One of two merges that start from the same version."""

    def __init__(self, place: Place, first: int) -> None:
        self.small, self.mirror = Place(place.uri, place.work / str(first), place.credentials).open()
        self.first = first
        self.outcome: Manifest | PublishConflictError | None = None

    def merge(self, start: threading.Barrier) -> None:
        """Plan, wait for the other, back up, publish."""
        plan = self.small.plan(self.small.batch(self.first))
        start.wait(60)
        try:
            self.outcome = self._publish(plan)
        except PublishConflictError as error:
            self.outcome = error

    def _publish(self, plan: MergePlan) -> Manifest:
        root, files = self.small.root, ShardFiles(self.small.root)
        manifest = merge_manifest(plan, write_shards(root, plan, files, self.small.work / "rewritten"))
        assert plan.current is not None
        backup_version(root, plan.current, self.mirror)
        publish_merge(root, plan, manifest)
        return manifest


def test_of_two_merges_at_once_one_wins_and_the_other_plans_again(place: Place) -> None:
    small, mirror = place.open()
    first = small.merge(0)
    mergers, start = (Merger(place, 100), Merger(place, 200)), threading.Barrier(2)
    threads = [threading.Thread(target=merger.merge, args=(start,)) for merger in mergers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    winners = [merger for merger in mergers if isinstance(merger.outcome, Manifest)]
    losers = [merger for merger in mergers if isinstance(merger.outcome, PublishConflictError)]
    assert (len(winners), len(losers)) == (1, 1)
    assert "another publisher won" in str(losers[0].outcome)
    assert_loads(small.root, 2)
    again = losers[0].small.merge(losers[0].first)
    assert_loads(small.root, 3)
    merged: Any = winners[0].outcome
    assert again.shards[:2] == merged.shards
    assert again.shards[:1] == first.shards
    assert_nothing_lost(small.root, mirror)
    assert mirror.current() == first


def test_a_case_is_not_killed_without_a_plan(tmp_path: Path) -> None:
    place = Place(str(tmp_path), tmp_path / "work")
    plan = Death()
    assert not is_killed("first publish", place, plan)
    assert plan.calls[-1] == "replace state.json"
    assert isinstance(place.open()[0], Small)
