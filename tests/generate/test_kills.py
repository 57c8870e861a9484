"""A run that is killed with SIGKILL, at every write to the store and between requests: the next one ends it right."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dflash.generate.session as session_module
from dflash.errors import StorageError
from dflash.generate.config import GenerateRun
from dflash.generate.spool import OPEN
from dflash.storage import Store, open_store
from tests.generate.conftest import MakeRun, completions, generate, records
from tests.generate.killed_run import run_in_child
from tests.generate.stub_server import Stub, serving
from tests.storage.faults import FaultPlan, FaultStore

NUM_PROMPTS = 25
IDS = sorted(f"q-{number}" for number in range(NUM_PROMPTS))
# Three parts with their indexes, the empty part that ends the log, then `_SUCCESS`.
NUM_WRITES = 8


def ids_on_disk(folder: Path) -> set[str]:
    """Ids of the whole lines of parts and spool."""
    files = [*(folder / "batch").glob("part-*.jsonl"), *folder.glob("work/generate-*/*.jsonl")]
    lines = [line for path in files for line in path.read_bytes().splitlines(keepends=True)]
    return {json.loads(line)["id"] for line in lines if line.endswith(b"\n")}


def check_rerun(run: GenerateRun, work: Path) -> None:
    """A rerun completes the batch: each id once, parts and indexes agree, nothing is left on the disk."""
    assert generate(run, work).is_complete
    batch = Path(run.batch)
    assert sorted(one.id or "" for one in completions(batch)) == IDS
    *parts, end = sorted(batch.glob("part-*.jsonl"))
    assert not end.read_bytes()
    for part in parts:
        index = json.loads((batch / "_parts" / part.with_suffix(".json").name).read_text())
        assert [look["id"] for look in index["records"]] == [
            json.loads(line)["id"] for line in part.read_text("utf-8").splitlines()
        ]
    success = json.loads((batch / "_SUCCESS").read_text())
    assert success["num_records"] == sum(part["num_records"] for part in success["parts"]) == NUM_PROMPTS
    assert not list(work.rglob("full-*"))
    assert not (next(work.glob("generate-*")) / OPEN).read_bytes()


def test_the_writes_are_those_that_are_struck(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan()

    def open_counted(uri: str, *_: object) -> Store:
        return FaultStore(open_store(uri), plan)

    monkeypatch.setattr(session_module, "open_store", open_counted)
    with serving(Stub()) as stub:
        generate(make_run(stub, NUM_PROMPTS), tmp_path / "work")
    assert len(plan.calls) == NUM_WRITES
    assert plan.calls[-2:] == ["put_if_absent part-00003.jsonl", "put_if_absent _SUCCESS"]


@pytest.mark.parametrize("point", range(1, NUM_WRITES + 1))
def test_killed_at_a_write(tmp_path: Path, make_run: MakeRun, point: int) -> None:
    with serving(Stub()) as stub:
        for when in ("before", "after"):
            folder = tmp_path / when
            run = make_run(stub, NUM_PROMPTS, model="stub").model_copy(update={"batch": str(folder / "batch")})
            plan = FaultPlan(point, when, "kill")  # type: ignore[arg-type]
            assert run_in_child(run, folder / "work", plan) == -signal.SIGKILL
            kept = ids_on_disk(folder)
            assert len(kept) >= min(10 * ((point + 1) // 2), NUM_PROMPTS), "parts that were full when it was killed"
            stub.seen.clear()
            check_rerun(run, folder / "work")
            asked = {f"question {name.removeprefix('q-')}" for name in set(IDS) - kept}
            assert set(stub.seen) == asked, "what was kept is not asked for again"


@pytest.mark.parametrize("num_requests", [1, 9, 17, 24])
def test_killed_between_requests(tmp_path: Path, make_run: MakeRun, num_requests: int) -> None:
    with serving(Stub(slots=1, service_s=0.01)) as stub:
        run = make_run(stub, NUM_PROMPTS, model="stub", max_in_flight=2)

        def kill(child: int) -> None:
            deadline = time.monotonic() + 60
            while sum(stub.seen.values()) < num_requests and time.monotonic() < deadline:
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)

        assert run_in_child(run, tmp_path / "work", FaultPlan(), kill) == -signal.SIGKILL
        check_rerun(run, tmp_path / "work")
    # Lost are at most the two requests that were in flight, and one whose record was being written.
    assert sum(stub.seen.values()) <= NUM_PROMPTS + 3


FOREIGN = [b'{"id": "q-3"}\n', b'{"id": "q-3", "request_hash": 5, "messages": []}\n', b'{"id": "", "messages": "x"}\n']


@pytest.mark.parametrize("tail", [b'{"id": "q-3", "mess', b"\x00" * 64, b'{"id": "q-3"', b"not json\n", *FOREIGN])
def test_a_torn_spool_is_mended(tmp_path: Path, make_run: MakeRun, tail: bytes) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, NUM_PROMPTS, model="stub", part_records=1000)
        generate(run.model_copy(update={"batch": str(tmp_path / "whole")}), tmp_path / "other")
        lines = (tmp_path / "whole" / "part-00000.jsonl").read_bytes().splitlines(keepends=True)[:5]
        spool = session_module.Spool(tmp_path / "work", run.batch, 10, 1 << 20)
        spool.folder.mkdir(parents=True)
        (spool.folder / OPEN).write_bytes(b"".join(lines) + tail)
        stub.seen.clear()
        check_rerun(run, tmp_path / "work")
    assert sum(stub.seen.values()) == NUM_PROMPTS - len(lines)


def test_lines_that_are_no_records_make_no_part(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, NUM_PROMPTS, model="stub")
        spool = session_module.Spool(tmp_path / "work", run.batch, 10, 1 << 20)
        spool.folder.mkdir(parents=True)
        (spool.folder / "full-00000.jsonl").write_bytes(b"".join(FOREIGN))
        check_rerun(run, tmp_path / "work")


def test_a_full_disk_is_told_of_and_keeps_what_was_whole(tmp_path: Path) -> None:
    look = {"request_hash": "h", "messages": [{"role": "assistant", "content": "x" * 90}]}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    spool = session_module.Spool(tmp_path, "/batch", 10, 1 << 20)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
        with pytest.raises(StorageError, match="the file system failed"):
            _append_nine(spool, look)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with session_module.Spool(tmp_path, "/batch", 10, 1 << 20) as again:
        assert [record["id"] for record in again.open_records()] == ["q-0", "q-1"]


def _append_nine(spool: session_module.Spool, fields: dict[str, Any]) -> None:
    with spool:
        for number in range(9):
            spool.append({"id": f"q-{number}", **fields})


def test_two_runs_at_once_on_two_machines(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub(slots=4, service_s=0.002)) as stub:
        run = make_run(stub, NUM_PROMPTS, model="stub", part_records=3)
        threads = [threading.Thread(target=_try_to_generate, args=(run, tmp_path / name)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        generate(run, tmp_path / "a")
    assert sorted(record["id"] for record in records(Path(run.batch))) == IDS


def _try_to_generate(run: GenerateRun, work: Path) -> None:
    generate(run, work)


def test_a_second_run_on_one_machine_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    from dflash.errors import UsageError

    with serving(Stub()) as stub:
        run = make_run(stub, 3)
        with (
            session_module.GenerateSession(run, None, tmp_path / "work"),
            pytest.raises(UsageError, match="Another process on this machine"),
        ):
            generate(run, tmp_path / "work")


@pytest.mark.parametrize("point", [1, 5])
def test_an_upload_that_fails_ends_the_run_and_keeps_what_waits(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, NUM_PROMPTS, part_records=2)
        with monkeypatch.context() as patched, ThreadPoolExecutor(1) as thread:
            plan = FaultPlan(point)
            patched.setattr(session_module, "open_store", lambda *_: FaultStore(open_store(run.batch), plan))
            with pytest.raises(StorageError, match=f"planned fault before call {point}"):
                thread.submit(generate, run, tmp_path / "work").result(timeout=120)
        check_rerun(run, tmp_path / "work")
