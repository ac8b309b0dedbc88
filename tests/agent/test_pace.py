"""How fast a world steps, once it has settled: told once, and again where that has changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from perdure.agent.pace import Pace, PaceMeter

LOOK = 0.5


class Steps:
    """A world whose steps take what a function says, looked at twice a second."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._meter = PaceMeter()
        self._ends = self._times(seconds)
        self._step, self._next = 0, next(self._ends)
        self._at = self.now = 100.0

    @staticmethod
    def _times(seconds: Callable[[int], float]) -> Iterator[float]:
        time, step = 100.0, 0
        while True:
            step += 1
            time += seconds(step)
            yield time

    def told(self, seconds: float, *, generation: int = 1, over: float = 30.0) -> list[Pace]:
        """What is told within the next seconds."""
        found, end = list[Pace](), self.now + seconds
        while self.now < end:
            self.now += LOOK
            while self._next <= self.now:
                self._step, self._at, self._next = self._step + 1, self._next, next(self._ends)
            if (pace := self._meter.follow(self._step, at=self._at, generation=generation, over=over)) is not None:
                found.append(pace)
        return found


def test_a_steady_pace_is_told_once() -> None:
    [pace] = Steps(lambda step: 0.1).told(600)
    assert pace.step == pytest.approx(0.1)
    assert pace.spread < 1e-6


def test_noise_is_told_as_the_spread() -> None:
    random.seed(3)
    [pace] = Steps(lambda step: random.uniform(0.5, 1.5)).told(600, over=120)
    assert pace.step == pytest.approx(1, rel=0.1)
    assert 0.02 < pace.spread < 0.4


@pytest.mark.parametrize(
    "pause",
    [
        pytest.param(lambda step: 12.0 if step % 100 == 0 else 0.0, id="evaluation every 100 steps"),
        pytest.param(lambda step: 20.0 if step < 3 else 0.0, id="compilation in the first steps"),
        pytest.param(lambda step: 2.0 if step % 200 == 0 else 0.0, id="a save every 200 steps"),
    ],
)
def test_pauses_do_not_count(pause: Callable[[int], float]) -> None:
    paces = Steps(lambda step: 0.1 + pause(step)).told(900, over=60)
    assert paces[-1].step == pytest.approx(0.1, rel=0.15)
    assert len(paces) == 1


def test_steps_that_are_longer_than_a_look_are_measured_exactly() -> None:
    [pace] = Steps(lambda step: 0.37).told(60, over=4)
    assert pace.step == pytest.approx(0.37)


@pytest.mark.parametrize(
    ("step", "told_after"),
    [
        pytest.param(2.0, 20 * 2.0, id="twenty steps"),
        pytest.param(10.0, 5 * 30.0, id="five times what is asked for"),
        pytest.param(40.0, 5 * 40.0, id="five steps"),
    ],
)
def test_slow_steps_are_measured_for_longer(step: float, told_after: float) -> None:
    steps = Steps(lambda _: step)
    assert steps.told(told_after - 1) == []
    [pace] = steps.told(2)
    assert pace.step == pytest.approx(step)


def test_a_change_is_told() -> None:
    steps = Steps(lambda step: 0.1 if step < 3000 else 0.2)
    assert len(steps.told(290)) == 1
    [pace] = steps.told(120)
    assert pace.step == pytest.approx(0.2, rel=0.01)


def test_each_world_is_measured_for_itself() -> None:
    steps = Steps(lambda step: 0.1)
    assert len(steps.told(60, generation=1)) == 1
    assert len(steps.told(60, generation=2)) == 1


def test_counts_that_begin_again_are_no_speed() -> None:
    meter = PaceMeter()
    for second in range(20):
        assert meter.follow(1000 + second, at=second, generation=1, over=30) is None
    found = [meter.follow(second - 20, at=second, generation=1, over=30) for second in range(20, 60)]
    assert found[:30] == [None] * 30
    [pace] = [one for one in found if one is not None]
    assert pace.step == pytest.approx(1)


def test_a_clock_that_is_set_back_or_ahead_is_no_speed() -> None:
    meter = PaceMeter()
    times = [*range(20), *range(5, 15), *range(5000, 5100)]
    found = [meter.follow(step, at=at, generation=1, over=30) for step, at in enumerate(times)]
    [pace] = [one for one in found if one is not None]
    assert pace.step == pytest.approx(1)
