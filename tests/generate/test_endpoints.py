"""Limits and health of endpoints, by the loop's clock given as a number."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from dflash.generate.answers import Failure
from dflash.generate.endpoints import FAULTS_IN_A_ROW, Endpoint, EndpointPool

BUSY = Failure("too_many_requests", "", is_pressure=True)
BROKEN = Failure("broken_connection", "", is_fault=True)


def go(endpoint: Endpoint, outcomes: list[Failure | None], now: float = 0.0) -> None:
    """Send as many as the endpoint takes, then let one end at a time."""
    for outcome in outcomes:
        while endpoint.free(now) >= 1:
            endpoint.take()
        endpoint.finish(outcome, now)


def test_the_limit_grows_to_the_most_that_is_allowed() -> None:
    endpoint = Endpoint("a", 1000)
    go(endpoint, [None] * 2500)
    assert endpoint.limit == 1000


def test_a_few_refusals_are_noise() -> None:
    endpoint = Endpoint("a", 256)
    chance = random.Random(3)
    go(endpoint, [BUSY if chance.random() < 0.02 else None for _ in range(8000)])
    assert endpoint.limit > 200


def test_the_limit_settles_where_the_server_stops_refusing() -> None:
    endpoint = Endpoint("a", 1000)
    for number in range(6000):
        now = number / 100
        while endpoint.free(now) >= 1:
            endpoint.take()
        if endpoint.in_flight:
            endpoint.finish(BUSY if endpoint.in_flight > 100 else None, now)
    assert 60 <= endpoint.limit <= 150


def test_a_dead_endpoint_rests_longer_and_longer_and_is_probed_by_one() -> None:
    endpoint = Endpoint("a", 64)
    go(endpoint, [BROKEN] * FAULTS_IN_A_ROW)
    endpoint.in_flight = 0
    assert endpoint.is_broken
    assert endpoint.free(0.9) == 0
    assert endpoint.free(1.1) == 1
    endpoint.take()
    assert endpoint.free(1.1) == 0
    endpoint.finish(BROKEN, 1.1)
    assert (endpoint.free(3.0), endpoint.free(3.2)) == (0, 1)
    endpoint.take()
    endpoint.finish(None, 3.2)
    assert not endpoint.is_broken
    assert endpoint.free(3.2) > 1


def test_an_endpoint_that_refuses_all_rests_and_is_probed_by_one() -> None:
    endpoint = Endpoint("a", 64)
    go(endpoint, [None], now=1.0)
    go(endpoint, [BUSY] * 40, now=2.0)
    assert not endpoint.is_refusing
    go(endpoint, [BUSY] * 23, now=2.0)
    go(endpoint, [BUSY], now=3.0)
    assert endpoint.is_refusing
    assert not endpoint.is_out, "it may still work at what it took"
    while endpoint.in_flight:
        endpoint.finish(BUSY, 3.1)
    assert (endpoint.is_out, endpoint.last_answer) == (True, 2.0)
    assert (endpoint.free(3.9), endpoint.free(4.1)) == (0, 1)
    endpoint.take()
    endpoint.finish(replace(BUSY, retry_after_s=7.0), 4.1)
    assert (endpoint.free(11.0), endpoint.free(11.2)) == (0, 1)
    endpoint.take()
    endpoint.finish(None, 11.2)
    assert (endpoint.is_out, endpoint.last_answer) == (False, 11.2)
    assert endpoint.free(11.2) > 1


def test_waiters_wake_when_a_rest_ends() -> None:
    async def work() -> str:
        pool = EndpointPool(("a",), 4)
        for _ in range(FAULTS_IN_A_ROW):
            endpoint = await pool.take()
            pool.give_back(endpoint, BROKEN)
        taken = await asyncio.wait_for(pool.take(), 10)
        pool.give_back(taken, None)
        return taken.url

    assert asyncio.run(work()) == "a"


def test_a_short_rest_is_not_slept_through_behind_a_long_one() -> None:
    async def work() -> str:
        pool = EndpointPool(("dead", "shaken"), 4)
        now = asyncio.get_running_loop().time()
        dead, shaken = pool.endpoints
        dead.resting_until, shaken.resting_until = now + 60, now + 60
        waiting = asyncio.create_task(pool.take())
        await asyncio.sleep(0)
        shaken.resting_until = now + 0.1
        shaken.take()
        pool.give_back(shaken, BROKEN)
        return (await asyncio.wait_for(waiting, 10)).url

    assert asyncio.run(work()) == "shaken"
