"""Tests of the times after which a pause means something, on the steps of healthy trainings and of one that hangs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import accumulate, chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.agent.stall_detector import GapSketch, StallDetector
from perdure.agent.stall_watch import StallLimits
from perdure.spec.timing import StallTiming

TIMING = StallTiming()
LOOK = 0.5
"""Seconds between two samples of an agent."""
KEPT = 10
"""Pauses that an agent remembers."""
LEARNED = 1_000
"""Samples with a new step after which it knows the gaps between steps."""


@pytest.mark.parametrize(
    ("usual", "pauses", "learned", "limits"),
    [
        (0.1, (), None, (15.0, 15.0, 120.0, 120.0, 240.0)),
        (10.0, (), None, (50.0, 50.0, 200.0, 200.0, 400.0)),
        (0.1, (30.0, 40.0, 5.0), None, (15.0, 80.0, 120.0, 120.0, 240.0)),
        (0.1, (30.0, 180.0, 5.0), None, (15.0, 360.0, 360.0, 360.0, 720.0)),
        # The steps are known.
        (0.1, (), 3.0, (11.0, 11.0, 14.0, 120.0, 240.0)),
        (0.1, (), 40.0, (15.0, 15.0, 39.0, 120.0, 240.0)),
        (0.1, (), 900.0, (15.0, 15.0, 120.0, 120.0, 240.0)),
        (10.0, (), 44.0, (46.0, 46.0, 49.0, 200.0, 400.0)),
        (0.1, (30.0, 40.0, 5.0), 3.0, (15.0, 80.0, 79.0, 120.0, 240.0)),
    ],
)
def test_limits(usual: float, pauses: Sequence[float], learned: float | None, limits: tuple[float, ...]):
    assert StallLimits.of(TIMING, usual=usual, pauses=pauses, learned=learned) == limits


def test_a_short_limit_has_a_first_look_in_half_of_it():
    quick = StallTiming(after=timedelta(seconds=4))
    assert StallLimits.of(quick, usual=0.1, pauses=()) == (2.0, 2.0, 4.0, 4.0, 8.0)
    assert StallLimits.of(quick, usual=0.1, pauses=(), learned=0.5) == (0.5, 0.5, 1.0, 4.0, 8.0)


class Node:
    """What an agent makes of steps of given lengths."""

    def __init__(self) -> None:
        self.detector = StallDetector(GapSketch())
        self.pauses: list[float] = []
        self.unusual: list[float] = []
        """The pauses in which the ranks were reported before there was a stall."""
        self.alarms: list[float] = []
        """Those that were reported as stalls."""
        self._time = self._stepped_at = 0.0

    def step(self, lengths: Iterable[float]) -> Node:
        """Follows the steps; each sample sees those that were made by then."""
        ends = enumerate(accumulate(lengths, initial=self._stepped_at), 1)
        pending, made = next(ends, None), 0
        while pending is not None:
            # Nothing happens at the samples in which no step has ended.
            self._time += LOOK * max(1, -(-(pending[1] - self._time) // LOOK))
            gap, limits = self.detector.idle(self._time) or 0.0, self.limits
            made = 0
            while pending is not None and pending[1] <= self._time:
                made, self._stepped_at = pending
                pending = next(ends, None)
            self._judge(gap - LOOK, limits)
            self.detector.follow((self._made + made,), self._time)
            self.pauses = [*self.pauses, *self.detector.take_pauses()][-KEPT:]
        self._made += made
        return self

    _made = 0

    def _judge(self, idle: float, limits: StallLimits) -> None:
        if idle >= limits.stalled:
            self.alarms.append(idle)
        elif idle >= limits.unusual:
            self.unusual.append(idle)

    @property
    def limits(self) -> StallLimits:
        usual = self.detector.usual or 0.0
        return StallLimits.of(TIMING, usual=usual, pauses=self.pauses, learned=self.detector.learned)


def recurring(length: float, *, step: float, every: int, times: int) -> Iterable[float]:
    """Steps with a pause after each so many of them."""
    return chain.from_iterable(chain(repeat(step, every), (length,)) for _ in range(times))


DICE = random.Random(29)
PROFILES: dict[str, list[float]] = {
    "steady": [0.03] * 40_000,
    "slow steps": [12.0] * 3_000,
    "bursty input": [0.05 + (0.5 if DICE.random() < 0.1 else 0.0) for _ in range(20_000)],
    "heavy-tailed input": [0.2 + DICE.lognormvariate(-3, 1.2) for _ in range(10_000)],
    "gradual slow-down": [min(0.03 * 1.0005**number, 6.0) for number in range(15_000)],
    "long sequences": [0.3] * 4_000 + [3.0] * 2_000,
    "other sequences in each epoch": ([0.1] * 3_000 + [1.0] * 500) * 6,
    # The ten newest pauses are of the short ones only.
    "short pauses and rare long ones": (([0.5] * 24 + [6.0]) * 20 + [40.0]) * 6,
}


@pytest.mark.parametrize("profile", PROFILES)
def test_nothing_is_said_of_steps_that_differ_as_healthy_ones_do(profile: str):
    node = Node().step(PROFILES[profile])
    assert node.detector.learned is not None, "it was long enough to be learned"
    assert (node.unusual, node.alarms) == ([], [])


@pytest.mark.parametrize(("length", "alarms"), [(20.0, 0), (100.0, 0), (180.0, 1)])
def test_evaluations_and_saves_are_known_after_the_first_one(length: float, alarms: int):
    node = Node().step(recurring(length, step=0.05, every=12_000, times=8))
    assert len(node.alarms) == alarms
    assert len(node.unusual) <= 1 - alarms


def test_what_is_learned_outlives_a_world():
    gaps = GapSketch()
    for world in range(4):
        detector = StallDetector(gaps)
        for sample in range(LEARNED // 4 + 1):
            detector.follow((sample + 1,), world * 1_000 + LOOK * sample)
        assert (detector.learned is None) is (world < 3)


@pytest.mark.parametrize("step", [0.03, 0.5, 3.0, 10.0, 60.0])
def test_the_ranks_that_hang_are_told_in_15_s_or_five_steps(step: float):
    node = Node().step(repeat(step, round(1.1 * LEARNED * max(LOOK / step, 1.0))))
    assert 14.0 <= node.limits.unusual < 1.01 * max(15.0, 5 * step) - LOOK


def test_what_is_known_takes_a_bounded_space_and_the_newest_gaps_count():
    gaps, dice = GapSketch(), random.Random(1)
    for _ in range(40_000):
        gaps.add(dice.lognormvariate(1, 3))
    assert len(vars(gaps)["_counts"]) <= 200
    wide = gaps.limit
    for _ in range(200_000):
        gaps.add(0.5)
    assert wide is not None
    assert gaps.limit is not None
    assert gaps.limit < 3.0 < wide


@given(
    step=st.floats(0.02, 4.0),
    spread=st.floats(1.0, 3.0),
    evaluation=st.floats(6.0, 100.0),
    varies=st.floats(1.0, 1.8),
    seed=st.integers(0, 2**20),
)
def test_no_healthy_training_is_said_to_stall_and_recurring_pauses_become_usual(
    step: float, spread: float, evaluation: float, varies: float, seed: int
):
    dice, node = random.Random(seed), Node()
    steps = round(400 * max(LOOK / step, 1.0))
    for _ in range(6):
        node.step(step * dice.uniform(1.0, spread) for _ in range(steps))
        node.step([evaluation * dice.uniform(1.0, varies) / varies])
    assert node.alarms == []
    # Each pause that is no longer than twice the one before is known.
    assert len(node.unusual) <= 1
