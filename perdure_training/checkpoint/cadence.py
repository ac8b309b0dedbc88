"""How often a step is saved."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

_ALLOCATING = 3
"""Number of saves that also allocate memory, one for each slot: they do not count."""
_MEASURED = 3
"""Number of saves after these whose median counts."""


@dataclass
class Measured:
    """The result of one measured save."""

    every: int | None = None
    """The number of steps between two saves, once it is known."""
    seconds: float = 0.0
    """How long the save took."""


class Cadence:
    """Decides which steps are due, by a number or by the cost of the first saves."""

    def __init__(
        self,
        every: int | Literal["auto"],
        *,
        max_overhead: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Creates the object.

        Raises:
            ValueError: if an argument is out of range.
        """
        if every != "auto" and every < 1:
            raise ValueError(f"every: expected 'auto' or at least 1, found {every!r}")
        if not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead: expected more than 0 and less than 1, found {max_overhead!r}")
        self._every = None if every == "auto" else every
        self._max_overhead = max_overhead
        self._clock = clock
        self._stalls: list[float] = []
        self._steps: list[float] = []
        self._last: tuple[int, float] | None = None

    def is_due(self, step: int, *, agreed: Callable[[], int | None]) -> bool:
        """Whether a step is saved.

        Args:
            step: The step.
            agreed: Returns the number that all ranks use with "auto", once there is one.
        """
        return step % self.every(agreed=agreed) == 0

    def every(self, *, agreed: Callable[[], int | None]) -> int:
        """The number of steps between two saves; 1 while "auto" measures."""
        return self._every or agreed() or 1

    @contextmanager
    def measure(self, step: int) -> Generator[Measured]:
        """Measures one save, and the steps since the one before."""
        begun, result = self._clock(), Measured()
        if self._last is not None and step > self._last[0]:
            self._steps.append((begun - self._last[1]) / (step - self._last[0]))
        yield result
        now = self._clock()
        self._last = (step, now)
        result.seconds = now - begun
        self._stalls.append(now - begun)
        if self._every is None and len(self._stalls) == _ALLOCATING + _MEASURED:
            share = statistics.median(self._stalls[_ALLOCATING:]) / max(statistics.median(self._steps), 1e-9)
            result.every = max(1, math.ceil(share / self._max_overhead))
