"""Tests of the limits of one agent, on a clock of their own."""

from __future__ import annotations

import asyncio

import pytest

from perdure.gateway.limits import AGENT, MESSAGE_BYTES, Bodies, BodyLimit, Limits, TooMany, refusal_seconds
from tests.support.waiting import DEADLINE


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> Limits:
    return Limits(AGENT, clock)


def calls(limits: Limits, node: str, tries: int) -> int:
    """How many of these calls, one after the other, are admitted."""
    admitted = 0
    for _ in range(tries):
        try:
            with limits.one_call(node):
                admitted += 1
        except TooMany:
            pass
    return admitted


def test_a_burst_is_admitted_and_then_so_many_a_second(limits: Limits, clock: Clock) -> None:
    assert calls(limits, "a", 1000) == AGENT.burst
    assert calls(limits, "a", 1000) == 0
    clock.now += 2
    assert calls(limits, "a", 1000) == 2 * AGENT.per_second
    clock.now += 1e6
    assert calls(limits, "a", 1000) == AGENT.burst


def test_an_address_gets_so_many_refusals_a_second_however_many_it_awaits() -> None:
    rates = [waiting / refusal_seconds(waiting) for waiting in (1, 10, 50, 100, 1000)]
    assert rates == sorted(rates)
    assert 1 < rates[0] < rates[-1] < 100


def test_others_are_not_affected(limits: Limits) -> None:
    calls(limits, "a", 1000)
    assert calls(limits, "b", 10) == 10


def test_calls_in_progress_are_limited(limits: Limits) -> None:
    open_calls = [limits.one_call("a") for _ in range(AGENT.at_once)]
    for one in open_calls:
        one.__enter__()
    with pytest.raises(TooMany, match="at once"), limits.one_call("a"):
        pass
    open_calls[0].__exit__(None, None, None)
    assert calls(limits, "a", 1) == 1


def test_bytes_count_as_calls(limits: Limits, clock: Clock) -> None:
    with limits.one_call("a"):
        for _ in range(3):
            limits.count_bytes("a", MESSAGE_BYTES)
        with pytest.raises(TooMany, match="bytes a second"):
            limits.count_bytes("a", MESSAGE_BYTES)
    assert calls(limits, "b", 1000) == AGENT.burst
    clock.now += 1e6
    with limits.one_call("a"):
        limits.count_bytes("a", MESSAGE_BYTES)


async def test_bodies_of_strangers_are_received_some_at_a_time() -> None:
    bodies = Bodies(BodyLimit(per_address=2, total=3, within=DEADLINE))
    received: list[str] = []
    sent = asyncio.Event()

    async def receive(address: str) -> bytes:
        async def read() -> bytes:
            received.append(address)
            await sent.wait()
            return b"x"

        return await bodies.receive(read, address=address)

    receiving = [asyncio.create_task(receive(address)) for address in ("a", "a", "a", "a", "b", "b", "b")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert sorted(received) == ["a", "a", "b"]
    sent.set()
    assert await asyncio.gather(*receiving) == [b"x"] * 7


async def test_a_slow_body_yields_its_place_to_one_that_waits() -> None:
    bodies = Bodies(BodyLimit(per_address=2, total=2, within=DEADLINE, yields=0.01))

    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    async def here() -> bytes:
        return b"x"

    slow = [asyncio.create_task(bodies.receive(never, address=f"slow {number}")) for number in range(2)]
    await asyncio.sleep(0)
    assert await bodies.receive(here, address="quick") == b"x"
    with pytest.raises(TooMany, match="or others waited"):
        await slow[0]
    assert not slow[1].done(), "one place was enough"
    slow[1].cancel()


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    bodies = Bodies(BodyLimit(per_address=1, total=1, within=0.01))

    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    async def here() -> bytes:
        return b"x"

    with pytest.raises(TooMany, match="not received"):
        await bodies.receive(never, address="a")
    assert await bodies.receive(here, address="a") == b"x"
