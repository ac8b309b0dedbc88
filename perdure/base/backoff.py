"""The pauses between attempts of what is tried again for as long as it takes.

tenacity and stamina repeat a call until it returns. Here most of what is tried again is a process, a worker or a watch:
it is expected to run on, and has succeeded when it has run for a while, not when it returns.
"""

from __future__ import annotations


class Backoff:
    """Pauses that double with each failure in a row, up to the longest; a success resets them."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def next_pause(self, *, ran: float = 0.0) -> float:
        """Returns the seconds to wait after one more failure.

        Args:
            ran: Seconds for which the attempt ran: from the longest pause on, it counts as a success that has ended.
        """
        if ran >= self._longest:
            self.reset()
        pause = self._next
        self._next = min(2 * pause, self._longest)
        return pause

    def reset(self) -> None:
        """Records a success."""
        self._next = self._first
