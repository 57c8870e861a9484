"""Servers that refuse, break, are gone or are others: what stops a run, and what only takes longer."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dflash.errors import DatasetError, ServiceError
from tests.generate.conftest import MakeRun, generate, records
from tests.generate.stub_server import Stub, answer, serving, unused_url


@dataclass(slots=True)
class Busy(Stub):
    """Refuses each question once and says how long to wait."""

    asked_at: list[float] = field(default_factory=list)

    async def handle(self, head: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if head.startswith(b"POST"):
            self.asked_at.append(time.monotonic())
            if len(self.asked_at) == 1:
                transport.write(b"HTTP/1.1 503 X\r\nretry-after: 1.2\r\ncontent-length: 0\r\n\r\n")
                return
        await Stub.handle(self, head, body, transport)


def test_a_server_that_refuses_everything_stops_the_run(tmp_path: Path, make_run: MakeRun) -> None:
    with (
        serving(Stub(status=401)) as stub,
        pytest.raises(ServiceError, match=r"^http://127\S+/v1 refuses .*unauthorised"),
    ):
        generate(make_run(stub, 100, model="stub"), tmp_path / "work")
    assert len(stub.bodies) <= 16, "those in flight, and no more"


def test_prompts_that_are_refused_stop_a_run_only_where_nothing_was_answered(tmp_path: Path, make_run: MakeRun) -> None:
    """Fifty prompts that don't fit the context are left of a large batch: they fail, and the batch is completed."""
    with serving(Stub(status=400)) as stub:
        run = make_run(stub, 80, model="stub", max_attempts=1, max_failed_share=0.999)
        with pytest.raises(ServiceError, match=rf"^{stub.url} refuses this run's requests \(refused\)"):
            generate(run, tmp_path / "work")
        assert len(stub.bodies) < 80
        stub.status = 200
        stub.answer = lambda request: answer(request, finish_reason="stop" if "question 7" in str(request) else "abort")
        with pytest.raises(DatasetError, match="failed"):
            generate(run.model_copy(update={"max_failed_share": 0.0}), tmp_path / "work")
        stub.status = 400
        outcome = generate(run, tmp_path / "work")
    assert (outcome.is_complete, outcome.num_failed) == (True, 80 - outcome.num_records)
    assert outcome.num_records == 11, "7 and 70 to 79"
    assert outcome.kinds == {"refused": 69}


def test_an_outage_stops_the_run_and_the_next_goes_on(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(Stub(url=unused_url()), 5, model="stub", max_outage_s=2, max_attempts=100)
    with pytest.raises(ServiceError, match="No endpoint has answered"):
        generate(run, tmp_path / "work")
    with serving(Stub()) as stub:
        assert generate(run.model_copy(update={"endpoints": (stub.url,)}), tmp_path / "work").num_new == 5


def test_prompts_outlive_a_server_that_refuses_all_for_a_while(tmp_path: Path, make_run: MakeRun) -> None:
    """A proxy before a server that starts anew: three tries of each prompt would be used up in a second."""
    with serving(Stub(status=503)) as stub:
        back = threading.Timer(2.5, setattr, (stub, "status", 200))
        back.start()
        outcome = generate(make_run(stub, 25, model="stub", max_attempts=3), tmp_path / "work")
        back.join()
    assert (outcome.is_complete, outcome.num_failed) == (True, 0)


def test_a_server_that_refuses_all_for_too_long_stops_the_run(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub(status=429)) as stub:
        run = make_run(stub, 25, model="stub", max_outage_s=1.5)
        with pytest.raises(ServiceError, match=r"No endpoint has answered for .*too_many_requests"):
            generate(run, tmp_path / "work")
        stub.status = 200
        assert generate(run, tmp_path / "work").num_new == 25


def test_work_goes_to_the_endpoint_that_lives(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Stub()) as stub:
        run = make_run(stub, 40, model="stub", max_attempts=20)
        both = run.model_copy(update={"endpoints": (unused_url(), stub.url)})
        assert generate(both, tmp_path / "work").num_failed == 0
    assert {record["server"] for record in records(tmp_path / "batch")} == {stub.url}


def test_a_server_of_another_model_stops_the_run(tmp_path: Path, make_run: MakeRun) -> None:
    with (
        serving(Stub(answer=lambda request: answer(request) | {"model": "other"})) as stub,
        pytest.raises(
            ServiceError, match=r"other_model\): http://127.*/v1 was asked for .* 'stub' and answered as 'other'"
        ),
    ):
        generate(make_run(stub, 20, model="stub"), tmp_path / "work")
    assert not list((tmp_path / "batch").glob("part-*"))


def test_a_server_is_left_alone_as_long_as_it_asks(tmp_path: Path, make_run: MakeRun) -> None:
    with serving(Busy()) as stub:
        outcome = generate(make_run(stub, 1), tmp_path / "work")
        assert isinstance(stub, Busy)
        first, second = stub.asked_at
    assert second - first >= 1.2, "the first wait of our own is at most a quarter of a second"
    assert outcome.kinds == {"overloaded": 1}
