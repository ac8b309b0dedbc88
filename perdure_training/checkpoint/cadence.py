"""How often a step is saved."""

from __future__ import annotations

import math
import os
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
        used: Callable[[], float] = time.process_time,
        cores: float | None = None,
    ) -> None:
        """Creates the object.

        Args:
            every: The number, or "auto".
            max_overhead: The share of a step's time that "auto" allows.
            clock: Returns seconds.
            used: Returns the seconds of a core that this process has used.
            cores: The rank's share of the node's cores.

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
        self._used = used
        self._cores = cores if cores is not None else _own_cores()
        self._begun: tuple[float, float, float] | None = None
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
    def measure(self, step: int, *, finishing: float) -> Generator[Measured]:
        """Measures one save, and the steps since the one before.

        Args:
            step: The step that is saved.
            finishing: Seconds of a core that were used for earlier saves after they had returned.
        """
        begun, result = self._clock(), Measured()
        if self._begun is None:
            self._begun = begun, self._used(), finishing
        if self._last is not None and step > self._last[0]:
            self._steps.append((begun - self._last[1]) / (step - self._last[0]))
        yield result
        now = self._clock()
        self._last = (step, now)
        result.seconds = now - begun
        self._stalls.append(now - begun)
        if self._every is None and len(self._stalls) == _ALLOCATING + _MEASURED:
            cost = statistics.median(self._stalls[_ALLOCATING:]) + self._taken_from_training(finishing)
            share = cost / max(statistics.median(self._steps), 1e-9)
            result.every = max(1, math.ceil(share / self._max_overhead))

    def _taken_from_training(self, finishing: float) -> float:
        """Seconds by which what follows a save makes the steps longer: none where the training leaves cores idle."""
        assert self._begun is not None
        begun, used, finished = self._begun
        busy = (self._used() - used) / max((self._clock() - begun) * self._cores, 1e-9)
        # The last save is not finished yet.
        return min(busy, 1.0) * (finishing - finished) / max(len(self._stalls) - 1, 1)


def _own_cores() -> float:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores / max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
