"""How fast the ranks of a node step, and for how long none of them has.

A rank that hangs in a collective takes the others with it, so it is not the slowest rank that counts here but any: as
long as one of them steps, the node is not stalled.
"""

from __future__ import annotations


class StallDetector:
    """Of one generation. Times are seconds on the monotonic clock, as exact as the looks are frequent."""

    def __init__(self) -> None:
        self._steps: tuple[int, ...] = ()
        self._began: tuple[float, int] | None = None
        """When counting began, and the furthest step then."""
        self._moved_at = 0.0

    def follow(self, steps: tuple[int, ...], now: float) -> None:
        """Takes in the steps of the ranks that have made any."""
        if not steps or steps == self._steps:
            return
        if self._began is None or max(steps) < max(self._steps):
            # Counting ends where reporting begins, so numbers may jump back once.
            self._began = (now, max(steps))
        self._steps, self._moved_at = steps, now

    @property
    def usual(self) -> float | None:
        """Seconds that a step takes, pauses included; None before a second one was seen."""
        if self._began is None:
            return None
        began, first = self._began
        made = max(self._steps) - first
        return (self._moved_at - began) / made if made > 0 else None

    def idle(self, now: float) -> float | None:
        """Seconds since some rank stepped; None before any did."""
        return None if self._began is None else now - self._moved_at
