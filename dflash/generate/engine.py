"""Asks for all prompts: many at a time, each again until it gives a record or has used up its tries."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dflash.errors import ServiceError
from dflash.generate.answers import Failure
from dflash.generate.client import Client
from dflash.generate.config import GenerateRun
from dflash.generate.endpoints import EndpointPool
from dflash.generate.requests import Request

FIRST_WAIT_S: Final = 0.25
MAX_WAIT_S: Final = 60.0
TICK_S: Final = 0.5
REFUSED_IN_A_ROW: Final = 50  # refusals before the first answer that mean the run, not the prompts


class Sink(Protocol):
    """Where records and failures go."""

    async def add(self, record: dict[str, Any]) -> None:
        """Keep a record; waits while the store is behind."""
        ...

    def give_up(self, request: Request, failure: Failure, attempts: int) -> None:
        """Note a prompt that has used up its tries."""
        ...


@dataclass(order=True, slots=True)
class _Job:
    due: float
    number: int
    request: Request = field(compare=False)
    attempts: int = field(default=0, compare=False)


@dataclass(slots=True)
class Tally:
    """Counts of a run, written in the event loop alone."""

    num_new: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_tries: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


class Engine:
    """One run's event loop work."""

    def __init__(self, run: GenerateRun, client: Client, pool: EndpointPool, sink: Sink, stop: threading.Event) -> None:
        self.tally = Tally()
        self._run = run
        self._client = client
        self._pool = pool
        self._sink = sink
        self._stop = stop
        self._waiting: list[_Job] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._active = 0
        self._source_ended = False
        self._num_refused = 0
        self._has_answers = False
        self._fault: str = ""

    async def run(self, requests: Iterator[Request], on_tick: Callable[[], None], *, has_answers: bool = False) -> None:
        """Work until every request is done or given up, or the run is stopped.

        Args:
            requests: read as they are needed.
            on_tick: called every half second.
            has_answers: earlier runs got answers with these parameters, so that refusals are the prompts' own.

        Raises:
            ServiceError: no endpoint answers any more, or all refuse; what is done is kept.
        """
        self._pool.started = asyncio.get_running_loop().time()
        self._has_answers = has_answers
        workers = [asyncio.create_task(self._work(requests)) for _ in range(self._run.max_in_flight)]
        watch = asyncio.create_task(self._watch(on_tick, workers))
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in (watch, *workers):
                task.cancel()
            await asyncio.gather(watch, *workers, return_exceptions=True)
        for task in (*workers, watch):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if self._fault:
            raise ServiceError(self._fault)

    async def _watch(self, on_tick: Callable[[], None], workers: list[asyncio.Task[None]]) -> None:
        """Tell the progress, and end the workers when the run shall stop."""
        while True:
            on_tick()
            silent = self._pool.silent_s(asyncio.get_running_loop().time())
            if silent > self._run.max_outage_s and all(endpoint.is_out for endpoint in self._pool.endpoints):
                self._fault = (
                    f"No endpoint has answered for {silent:.0f} s ({', '.join(self._run.endpoints)}); failed tries: "
                    f"{dict(self.tally.kinds)}. What is done is kept: start the servers and run this again."
                )
            if self._stop.is_set() or self._fault:
                for worker in workers:
                    worker.cancel()
                return
            await asyncio.sleep(TICK_S)

    async def _work(self, requests: Iterator[Request]) -> None:
        while (job := await self._next(requests)) is not None:
            try:
                await self._try(job)
            finally:
                self._active -= 1
                self._changed.set()

    async def _next(self, requests: Iterator[Request]) -> _Job | None:
        """A job that is due, else a new one, counted as active; None when nothing is left or the run can't succeed."""
        loop = asyncio.get_running_loop()
        while not self._fault:
            now = loop.time()
            if self._waiting and self._waiting[0].due <= now:
                self._active += 1
                return heapq.heappop(self._waiting)
            # Jobs that wait are bounded, so that a server which refuses everything doesn't draw all prompts in.
            if not self._source_ended and len(self._waiting) < 4 * self._run.max_in_flight:
                request = next(requests, None)
                if request is not None:
                    self._active += 1
                    return _Job(now, next(self._numbers), request)
                self._source_ended = True
            if self._source_ended and not self._waiting and not self._active:
                self._changed.set()
                return None
            await self._sleep_until_changed(self._waiting[0].due - now if self._waiting else None)
        return None

    async def _sleep_until_changed(self, seconds: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _try(self, job: _Job) -> None:
        endpoint = await self._pool.take()
        job.attempts += 1
        self.tally.num_tries += 1
        failure: Failure | None = Failure("stopped", "the run was stopped")
        try:
            answer = await self._client.ask(endpoint.url, job.request, job.attempts)
            failure = answer if isinstance(answer, Failure) else None
        finally:
            self._pool.give_back(endpoint, failure)
        if isinstance(answer, Failure):
            self._failed(job, answer, endpoint.url)
            return
        self._has_answers = True
        await self._sink.add(answer)
        self.tally.num_new += 1
        self.tally.num_tokens += answer.get("output_tokens") or 0

    def _failed(self, job: _Job, failure: Failure, server: str) -> None:
        self.tally.kinds[failure.kind] += 1
        self._num_refused += not failure.may_retry
        if failure.is_fatal or (self._num_refused >= REFUSED_IN_A_ROW and not self._has_answers):
            self._fault = (
                f"{server} refuses this run's requests ({failure.kind}): {failure.message}\n"
                "Check endpoint, model, API key and parameters; nothing that is done is lost."
            )
            return
        if not failure.may_retry or job.attempts >= self._run.max_attempts:
            self._sink.give_up(job.request, failure, job.attempts)
            self.tally.num_failed += 1
            return
        if failure.other_seed:
            job.request = job.request.with_other_seed(job.attempts)
        wait = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (job.attempts - 1)) * random.uniform(0.5, 1.0)
        job.due = asyncio.get_running_loop().time() + max(wait, failure.retry_after_s)
        heapq.heappush(self._waiting, job)
