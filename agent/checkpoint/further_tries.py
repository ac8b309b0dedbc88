"""When a call of the storage that does not return is tried again while it waits.

A call to a network file system whose server is gone may wait forever, also where the file system has been mounted again
since: a later call reaches the new mount. Each call that waits keeps a thread.
"""

from __future__ import annotations

import time

from perdure.base.backoff import Backoff

_FIRST_PAUSE = 60.0
"""Seconds from the time at which a call is known to hang until the next try."""
_LONGEST_PAUSE = 600.0
"""Seconds: a storage that hangs for a day keeps some 150 threads, which do nothing."""


class FurtherTries:
    """The tries of one call."""

    def __init__(self) -> None:
        """The storage answers."""
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._due: float | None = None

    def is_due(self) -> bool:
        """Returns whether the call is tried again now, and counts that try; called while the storage hangs."""
        now = time.monotonic()
        is_due = self._due is not None and now >= self._due
        if self._due is None or is_due:
            self._due = now + self._backoff.next_pause()
        return is_due

    def reset(self) -> None:
        """Records that the storage answers again."""
        self._due = None
        self._backoff.reset()
