"""Waits for files: the one thread of a warm interpreter has many to look after, and may have no other."""

from __future__ import annotations

import select
from collections.abc import Callable


class Loop:
    """Calls a handler for each descriptor on which something can be read."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def forget(self, descriptor: int) -> None:
        """To be called before the descriptor is closed."""
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)

    def attend(self, timeout_s: float | None) -> None:
        """Handles what has happened, and waits for something to happen at most so long; None: without limit."""
        for descriptor, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if handler := self._handlers.get(descriptor):
                handler()
