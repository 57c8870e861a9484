"""Servers with their health and the number of requests each gets at a time.

The limit of an endpoint follows its answers by windows: a window in which more than a tenth of the tries met
back-pressure (429, 503, time-outs) shrinks it by 30 %; one with less than a twentieth lets it grow, by doubling until
the first shrinking, by 5 % afterwards. Single refusals are noise and change nothing: at 2 % of them, halving on each
(as TCP does) would leave about a dozen requests in flight.

A server that breaks or refuses every time (a restart behind a proxy looks like that) rests, longer and longer, and is
then asked by one request: prompts would use up their tries on it within a minute.
"""

from __future__ import annotations

import asyncio
import collections
from dataclasses import dataclass, field
from typing import Final

from dflash.generate.answers import Failure

FIRST_LIMIT: Final = 64
MIN_WINDOW: Final = 20  # tries
SHRINK_SHARE: Final = 0.10
GROW_SHARE: Final = 0.05
FAULTS_IN_A_ROW: Final = 8
FIRST_COOL_DOWN_S: Final = 1.0
MAX_COOL_DOWN_S: Final = 60.0


@dataclass(slots=True)
class Endpoint:
    """One server.

    Attributes:
        url: base URL.
        max_limit: most requests in flight.
        limit: requests that it may have now.
        in_flight: requests that it has.
        resting_until: it gets nothing before this time (of the loop's clock).
        last_answer: when it last answered, be it with a refusal among answers.
    """

    url: str
    max_limit: int
    limit: float = field(init=False)
    in_flight: int = 0
    resting_until: float = 0.0
    last_answer: float = 0.0
    _cool_down_s: float = FIRST_COOL_DOWN_S
    _faults_in_a_row: int = 0
    _refused_in_a_row: int = 0
    _tried: int = 0
    _pressed: int = 0
    _peak: int = 0
    _is_starting: bool = True

    def __post_init__(self) -> None:
        self.limit = float(min(FIRST_LIMIT, self.max_limit))

    @property
    def is_broken(self) -> bool:
        """Whether the last tries all met a broken connection or server."""
        return self._faults_in_a_row >= FAULTS_IN_A_ROW

    @property
    def is_refusing(self) -> bool:
        """Whether the last tries, as many as it may have at a time, were all refused as too much."""
        return self._refused_in_a_row >= max(MIN_WINDOW, self.limit)

    @property
    def is_out(self) -> bool:
        """Whether nothing can be hoped of it now; one that refuses may still work at what it took before."""
        return self.is_broken or (self.is_refusing and not self.in_flight)

    def free(self, now: float) -> float:
        """Requests that it can take; after a rest one alone, as a probe."""
        if now < self.resting_until:
            return 0
        limit = 1.0 if self.is_broken or self.is_refusing else self.limit
        return limit - self.in_flight

    def take(self) -> None:
        """A request goes there."""
        self.in_flight += 1
        self._peak = max(self._peak, self.in_flight)

    def finish(self, failure: Failure | None, now: float) -> None:
        """A request came back."""
        self.in_flight -= 1
        self._note_health(failure, now)
        self._tried += 1
        self._pressed += failure is not None and failure.is_pressure
        if self._tried >= max(MIN_WINDOW, self.limit):
            self._adapt()

    def _note_health(self, failure: Failure | None, now: float) -> None:
        if failure is not None and failure.is_fault:
            self._faults_in_a_row, self._refused_in_a_row = self._faults_in_a_row + 1, 0
        elif failure is not None and failure.is_pressure:
            self._faults_in_a_row, self._refused_in_a_row = 0, self._refused_in_a_row + 1
        else:
            self._faults_in_a_row, self._refused_in_a_row = 0, 0
        if failure is not None and (self.is_broken or self.is_refusing):
            if now >= self.resting_until:
                self.resting_until = now + max(self._cool_down_s, failure.retry_after_s)
                self._cool_down_s = min(MAX_COOL_DOWN_S, 2 * self._cool_down_s)
        elif not self._faults_in_a_row:
            self.last_answer, self._cool_down_s = now, FIRST_COOL_DOWN_S

    def _adapt(self) -> None:
        share = self._pressed / self._tried
        if share > SHRINK_SHARE:
            self.limit, self._is_starting = max(1.0, 0.7 * self.limit), False
        elif share < GROW_SHARE and self._peak >= 0.9 * self.limit - 1:
            grown = 2 * self.limit if self._is_starting else self.limit + max(1.0, 0.05 * self.limit)
            self.limit = min(float(self.max_limit), grown)
        self._tried = self._pressed = 0
        self._peak = self.in_flight


class EndpointPool:
    """Hands requests to the endpoint with most room; for use in one event loop."""

    def __init__(self, urls: tuple[str, ...], max_in_flight: int) -> None:
        self.endpoints = [Endpoint(url, max_in_flight) for url in urls]
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None
        self.started = 0.0

    @property
    def in_flight(self) -> int:
        """Requests of all endpoints."""
        return sum(endpoint.in_flight for endpoint in self.endpoints)

    @property
    def limit(self) -> int:
        """Requests that all endpoints together may have now."""
        return int(sum(endpoint.limit for endpoint in self.endpoints))

    def silent_s(self, now: float) -> float:
        """Seconds since any endpoint answered, or since the start."""
        return now - max(self.started, *(endpoint.last_answer for endpoint in self.endpoints))

    async def take(self) -> Endpoint:
        """Wait for room; the caller gives the endpoint back by `give_back`."""
        loop = asyncio.get_running_loop()
        while (found := self._roomiest(loop.time())) is None:
            self._wake_after_rest(loop)
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append(future)
            await future
        found.take()
        return found

    def give_back(self, endpoint: Endpoint, failure: Failure | None) -> None:
        """A request ended."""
        now = asyncio.get_running_loop().time()
        endpoint.finish(failure, now)
        self._wake(1 + max(0, int(endpoint.free(now)) - 1))

    def _roomiest(self, now: float) -> Endpoint | None:
        best = max(self.endpoints, key=lambda endpoint: endpoint.free(now))
        return best if best.free(now) >= 1 else None

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1

    def _wake_after_rest(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for the earliest end of a rest."""
        ends = [endpoint.resting_until for endpoint in self.endpoints if endpoint.resting_until > loop.time()]
        if not ends or (self._timer is not None and loop.time() < self._timer.when() <= min(ends)):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(ends), lambda: self._wake(len(self._waiting)))
