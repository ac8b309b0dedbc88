"""An event loop for file descriptors: the warm interpreter has many of them, and only one thread."""

from __future__ import annotations

import select
from collections.abc import Callable


class Loop:
    """Calls a handler for each readable descriptor."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def forget(self, descriptor: int) -> None:
        """Stops watching a descriptor; call it before the descriptor is closed."""
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)

    def attend(self, timeout_s: float | None) -> None:
        """Handles pending events, and waits for one at most for this long; None: without limit."""
        for descriptor, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if handler := self._handlers.get(descriptor):
                handler()
