"""When the next durable checkpoint is due: by steps, by time, or because it was requested."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

_FIRST_INTERVAL = 60.0
"""Seconds until the first checkpoint where the job chooses the interval: until then nothing is known of its cost."""
_NEXT_TRY = 30.0
"""Seconds until a requested checkpoint is tried again that could not be stored."""
_REMEMBERED = 8
"""Announced steps that are remembered: more than are copied at a time."""
_LEAD = 2
"""Steps between the announcement of a checkpoint and its step: every rank has made one step together with rank 0 by
then, and so learns of it in time. Ranks that make steps apart, as in local SGD, need more."""
_LONGEST_LEAD = 1000
"""Steps."""


class Schedule:
    """Chooses the steps that are stored. Only rank 0's counts.

    Invariants:
        - A requested checkpoint is due at once, and counts as the last one for the others.
        - It is due again until one is durable that was announced after the request.
    """

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the object.

        Args:
            every_steps: Steps between two checkpoints.
            every_seconds: Seconds between two; None for steps, or where the job chooses the interval.
            clock: Returns seconds.
        """
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._clock = clock
        self._tried = self._answered = 0
        self._next_try = 0.0
        self._last_step: int | None = None
        self._saved: int | None = None
        """The step that is saved."""
        self._gap = 0
        """Steps since the one that was saved before it; 0 where that is unknown."""
        self._lead = _LEAD
        self._announced: dict[int, int] = {}
        """The steps that were announced last, and the newest request that each answers."""
        self._last = clock()

    def begin(self, step: int) -> None:
        """Records the step that the training begins with."""
        self._last_step = self._saved = step
        self._last = self._clock()

    def record(self, step: int) -> None:
        """Records that a step is saved next."""
        self._gap = step - self._saved if self._saved is not None else 0
        self._saved = step

    def lead_by(self, steps: int) -> None:
        """Announces so many steps earlier, as ranks were apart by them and could not store the same one."""
        self._lead = max(self._lead, min(2 * (steps + _LEAD), _LONGEST_LEAD))

    @property
    def announced(self) -> int:
        """The step that was announced last; -1 if none was."""
        return next(reversed(self._announced), -1)

    def answers(self, step: int) -> int:
        """The newest request that a step answers: it may still be copied when the next one is announced."""
        return max((request for announced, request in self._announced.items() if announced <= step), default=0)

    def answer(self, request: int, step: int) -> None:
        """Records that a step is stored that answers a request, without an announcement: all checkpointers store it, so
        no earlier step of one of them does."""
        self._tried, self._next_try = max(self._tried, request), self._clock() + _NEXT_TRY
        self._announced = {step: self._tried}
        self.begin(step)

    def _announce(self, step: int) -> None:
        # Another thread reads it.
        self._announced = {**dict([*self._announced.items()][-_REMEMBERED:]), step: self._tried}

    def finish(self, request: int) -> None:
        """Marks all requests up to `request` as answered by a durable checkpoint."""
        self._answered = max(self._answered, request)

    def next_target(self, step: int, *, every: int, desired: Mapping[str, Any]) -> int | None:
        """Returns the step to announce; None if none is due yet. The next one at or after it that is saved is stored.

        Args:
            step: The step that is being saved.
            every: Steps between two saves, or fewer: the announced step is a multiple of it.
            desired: As `StorageLink.desired` returns it.
        """
        soonest = step + self._lead
        requested, now = int(desired.get("request", 0)), self._clock()
        answered = max(self._answered, int(desired.get("answered", 0)))
        if self._last_step is None:
            self._last_step = step - 1
        if requested > answered and (requested > self._tried or now >= self._next_try):
            self._tried, self._next_try = requested, now + _NEXT_TRY
        elif self._every_steps is not None:
            due = (self._last_step // self._every_steps + 1) * self._every_steps
            # The next save may be far ahead, where the script makes few.
            if due > soonest + max(every, self._gap):
                return None
            soonest = max(soonest, due)
        elif now - self._last < self._interval(desired):
            return None
        target = math.ceil(soonest / every) * every
        self._last_step, self._last = target, now
        self._announce(target)
        return target

    def _interval(self, desired: Mapping[str, Any]) -> float:
        return self._every_seconds or float(desired.get("interval_s") or _FIRST_INTERVAL)
