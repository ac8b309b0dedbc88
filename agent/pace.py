"""Measures how fast a world steps, once it has settled: what happens now and then, such as an evaluation or a save that
stops the training, is left out. The pace of a world is told again from time to time, so that a job learns from the
progress that comes with it how long such pauses are."""

from __future__ import annotations

from statistics import quantiles
from typing import NamedTuple

from perdure.contract.agents import CHANGED_PACE

_WINDOWS = 20
"""Measurements of which the median counts, and into which the time is divided."""
_STEPS = 20
"""Steps that are measured, unless they take `_LONG` times as long as what is asked for: a job of long steps would stay
long with a wrong number of nodes."""
_LONG = 5
_FEWEST = 5
"""Measurements, each of a step or more. With fewer, noise would speak for a number of nodes."""
_AGAIN = 20
"""The pace is told again after so many measurements, then after twice as many each time."""


class Pace(NamedTuple):
    """The usual step of a world, in seconds."""

    step: float
    spread: float
    """Half the distance between the quartiles of the measurements."""


class PaceMeter:
    """The pace of one world after another, told once for each, and again where it has changed or long has passed."""

    def __init__(self) -> None:
        self._generation = 0
        self._began: tuple[float, int] | None = None
        """The time and the step with which the present measurement began."""
        self._last = (0.0, 0)
        self._steps: list[float] = []
        """Seconds of a step in each window."""
        self._told: float | None = None
        self._entered, self._again_at = 0.0, 0.0
        """When the world made its first known step, and when its pace is told again."""

    def follow(self, step: int, *, at: float, generation: int, over: float) -> Pace | None:
        """Takes in the newest step of the slowest rank; returns the pace where it is to be told.

        Args:
            step: The step.
            at: When the rank made it, in seconds on a clock of this machine that may be set.
            generation: The generation that has made it.
            over: Seconds of steps of one measurement.
        """
        if generation != self._generation:
            self._generation, self._began, self._told = generation, None, None
            self._entered, self._again_at = at, at + _AGAIN * over
        if self._began is None or step < self._last[1] or at < self._last[0]:
            self._began = self._begin(step, at)
            return None
        since, first = self._last
        if step == first or at - since < over / _WINDOWS:
            return None
        self._steps.append((at - since) / (step - first))
        self._last = (at, step)
        began, begun_with = self._began
        enough = over if step - begun_with >= _STEPS else _LONG * over
        if at - began < enough or len(self._steps) < _FEWEST:
            return None
        lower, usual, upper = quantiles(self._steps, n=4)
        self._began = self._begin(step, at)
        is_due = at >= self._again_at
        if is_due:
            self._again_at = self._entered + 2 * (at - self._entered)
        elif self._told is not None and abs(usual - self._told) <= CHANGED_PACE * self._told:
            return None
        self._told = usual
        return Pace(step=usual, spread=(upper - lower) / 2)

    def _begin(self, step: int, at: float) -> tuple[float, int]:
        self._last, self._steps = (at, step), []
        return self._last
