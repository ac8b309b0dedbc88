"""How often a step is saved, and how all ranks agree on it.

Saves cost more or less as a job goes on: other work comes and goes on the machine, and the first saves follow each
other more closely than later ones. So the cost is measured again and again, and the number follows it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

_ALLOCATING = 3
"""Number of saves that also allocate memory, one for each slot: they do not count."""
_MEASURED = 3
"""Number of saves after these that count."""
_MEASURED_AGAIN = 4
"""The cost is calculated again after each so many saves."""
_REMEMBERED = 12
"""Number of saves that count then."""
_HEADROOM = 1.2
"""Saves may cost this factor more than the last ones before they cost too much; a number that differs less than this
is not chosen anew, which would only follow noise."""
_LOOKED_FOR = 2
"""A rank looks for another number at each so many saves: it asks another process, which takes a moment. Where a script
calls for few saves, at the first one from each multiple of so many on."""
_KEY = "every"


@dataclass
class Measured:
    """The result of one measured save."""

    saved: bool = True
    """Whether the step was saved. The caller says so; what was not saved says nothing of the cost."""
    every: int | None = None
    """The number of steps between two saves that the cost calls for, if it is another one than before."""
    seconds: float = 0.0
    """How long the save took."""


class AgreedStore(Protocol):
    """What ranks agree by: a part of torch's `Store`."""

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


class AgreedCadence:
    """The number of steps between two saves that rank 0 chose.

    Invariants:
        - All ranks look for a new number after the same saves, whatever steps the script saves, and change after the
        same one: a step that only some of them save could not be restored.
        - Rank 0 changes as the others do, by looking.
    """

    def __init__(self, store: AgreedStore) -> None:
        self._store = store
        self._every: int | None = None
        self._looked = -1
        """The step of the last look."""
        self._chosen_from = 0
        """As rank 0: the step from which on ranks that look adopt the number that was chosen last."""

    def every(self, step: int) -> int | None:
        """The number at a step; None while rank 0 measures the first saves."""
        if self._every is None and self._store.check([_KEY]):
            begins, every, before = self._read()
            self._every = before if begins else every
        return self._every

    def look(self, step: int) -> None:
        """Looks for another number, now and then; called after each step that is saved, due or not."""
        if self._every is None:
            return
        looks = _LOOKED_FOR * self._every
        if self._looked >= 0 and step // looks == self._looked // looks:
            return
        self._looked = step
        # Where the store is gone, the generation ends; a save is not what fails.
        with suppress(RuntimeError):
            begins, every, before = self._read()
            # Rank 0 may have made this look already, and chosen again since.
            self._every = every if step >= begins else before

    def choose(self, every: int, *, step: int) -> None:
        """Tells all ranks, as rank 0, after a step that was saved; not while the last choice is still ahead."""
        if step < self._chosen_from:
            return
        # The next look of all ranks: some may look at this step later than this.
        looks = _LOOKED_FOR * (self._every or 0)
        self._chosen_from = step - step % looks + looks if looks else 0
        with suppress(RuntimeError):
            self._store.set(_KEY, f"{self._chosen_from} {every} {self._every or every}")

    def _read(self) -> tuple[int, int, int]:
        """Returns the step from which on a look adopts the number that was chosen last, this number, and the one
        before."""
        begins, every, before = self._store.get(_KEY).split()
        return int(begins), int(every), int(before)


class Cadence:
    """Decides which steps are due, by a number or by the cost of the last saves."""

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
        """Since the cost was calculated."""
        self._counted: list[float] = []
        """The stalls before, as far as they still count."""
        self._steps: list[float] = []
        self._last: tuple[int, float] | None = None

    def is_due(self, step: int, *, agreed: int | None) -> bool:
        """Whether a step is saved.

        Args:
            step: The step.
            agreed: The number that all ranks use with "auto", once there is one.
        """
        return step % self.every(agreed=agreed) == 0

    def every(self, *, agreed: int | None) -> int:
        """The number of steps between two saves; 1 while "auto" measures the first ones."""
        return self._every or agreed or 1

    @property
    def is_auto(self) -> bool:
        """Whether the number depends on the cost."""
        return self._every is None

    @contextmanager
    def measure(self, step: int, *, agreed: int | None, finishing: float) -> Generator[Measured]:
        """Measures one save, and the steps since the one before.

        Args:
            step: The step that is saved.
            agreed: As for `is_due`.
            finishing: Seconds of a core that were used for earlier saves after they had returned.
        """
        begun, used, result = self._clock(), self._used(), Measured()
        yield result
        now = self._clock()
        result.seconds = now - begun
        if self.is_auto and result.saved:
            self._begun = self._begun or (begun, used, finishing)
            if self._last is not None and step > self._last[0]:
                self._steps.append((begun - self._last[1]) / (step - self._last[0]))
            self._stalls.append(result.seconds)
            result.every = self._called_for(agreed, finishing)
        self._last = (step, now)

    def _called_for(self, agreed: int | None, finishing: float) -> int | None:
        """The number that the cost of the last saves calls for, once enough were measured, and if it is another one."""
        enough = len(self._stalls) >= (_MEASURED_AGAIN if agreed else _ALLOCATING + _MEASURED)
        # A script that saves one step several times makes saves without steps.
        if not (enough and self._steps):
            return None
        self._counted = [*self._counted, *(self._stalls if agreed else self._stalls[_ALLOCATING:])][-_REMEMBERED:]
        cost = _HEADROOM * (_usual(self._counted) + self._taken_from_training(finishing))
        share = cost / max(statistics.median(self._steps), 1e-9)
        every = max(1, math.ceil(share / self._max_overhead))
        self._begun, self._stalls, self._steps = None, [], []
        is_noise = agreed is not None and 1 / _HEADROOM < every / agreed < _HEADROOM
        return None if is_noise else every

    def _taken_from_training(self, finishing: float) -> float:
        """Seconds by which what follows a save makes the steps longer: none where the training leaves cores idle."""
        assert self._begun is not None
        begun, used, finished = self._begun
        busy = (self._used() - used) / max((self._clock() - begun) * self._cores, 1e-9)
        # The last save is not finished yet.
        return min(busy, 1.0) * (finishing - finished) / max(len(self._stalls) - 1, 1)


def _usual(stalls: Sequence[float]) -> float:
    """The mean without the longest one, which may be an accident; of a few, which may all be short by chance, the
    longest."""
    return statistics.mean(sorted(stalls)[:-1]) if len(stalls) > _MEASURED else max(stalls)


def _own_cores() -> float:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores / max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
