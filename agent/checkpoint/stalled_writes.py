"""Notices that a storage takes nothing of what is written to it: a call to a network file system whose server is gone
never returns, and raises nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

WITHIN = 120.0
"""Seconds in which the storage must take a piece of a file."""
_SLOWEST = 1 << 24
"""Bytes a second with which a storage makes durable what it has taken, at least: a file system of a network takes
gigabytes into memory, and writes them when the file is closed."""


_AT_ONCE = 2
"""Parts that are written at the same time: more would take the network and the disk from the training."""


def hangs(url: str) -> str:
    """Says that a storage takes nothing."""
    return f"{url} hangs: it takes nothing of what is stored. See on this node whether its server is reached"


class WriteTurns:
    """Lets a few parts be written at the same time."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_AT_ONCE)

    @contextmanager
    def take(self) -> Generator[Callable[[], None]]:
        """Waits for a turn, which lasts as long as the context is open, and yields what ends it before: of a write that
        may never end."""
        taken = threading.Lock()

        def end() -> None:
            if taken.acquire(blocking=False):
                self._free.release()

        self._free.acquire()
        try:
            yield end
        finally:
            end()


class StalledWrites:
    """Notices, in a thread of its own, that one part is not taken; a part is written in the caller's thread."""

    def __init__(self, notice: Callable[[], None]) -> None:
        """Begins to count.

        Args:
            notice: Called once if nothing is taken for long, in a thread of its own.
        """
        self._notice = notice
        self._until = time.monotonic() + WITHIN
        self._over = threading.Event()

    def noted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yields the pieces of a file, and takes note of each that the storage takes."""
        taken = 0
        for piece in pieces:
            yield piece
            taken += len(piece)
            self._until = time.monotonic() + WITHIN
        self._until = time.monotonic() + WITHIN + taken / _SLOWEST

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watches as long as the context is open."""
        threading.Thread(target=self._watch, name="stalled-writes", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self._notice()
