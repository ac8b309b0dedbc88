"""Tests of the limits of one agent, on a clock of their own."""

from __future__ import annotations

import pytest

from perdure.gateway.limits import AGENT, Limits, TooMany, refusal_seconds


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
