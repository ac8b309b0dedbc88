"""Detects stalls: measures the step time of a node's ranks, and the time since any of them stepped.

A rank that hangs in a collective stops the others with it. So not the slowest rank counts here but any rank: as long
as one of them steps, the node is not stalled.
"""

from __future__ import annotations

_PAUSE = 5.0
"""Seconds without a step, and usual steps that could have been made in them, from which on that is a pause."""


class StallDetector:
    """The step times of one generation. Times are seconds on the monotonic clock, as exact as the samples are
    frequent."""

    def __init__(self) -> None:
        self._steps: tuple[int, ...] = ()
        self._began: tuple[float, int] | None = None
        """The time and the highest step at the first sample."""
        self._moved_at = 0.0
        self._pauses: list[float] = []

    def follow(self, steps: tuple[int, ...], now: float) -> None:
        """Adds a sample: the steps of the ranks that have made any."""
        if not steps or steps == self._steps:
            return
        if (usual := self.usual) is not None and now - self._moved_at >= max(_PAUSE, _PAUSE * usual):
            self._pauses.append(now - self._moved_at)
        if self._began is None or max(steps) < max(self._steps):
            # Counted steps are replaced by reported ones as soon as there are any, so numbers may jump back once.
            self._began = (now, max(steps))
        self._steps, self._moved_at = steps, now

    def take_pauses(self) -> list[float]:
        """Returns the seconds of each pause that has ended since the last call."""
        taken, self._pauses = self._pauses, []
        return taken

    @property
    def usual(self) -> float | None:
        """Seconds per step, including pauses; None before the second step."""
        if self._began is None:
            return None
        began, first = self._began
        made = max(self._steps) - first
        return (self._moved_at - began) / made if made > 0 else None

    def idle(self, now: float) -> float | None:
        """Returns the seconds since any rank stepped; None before the first step."""
        return None if self._began is None else now - self._moved_at
