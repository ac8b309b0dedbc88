"""Signals as events: whatever the main thread does, none is lost.

Python runs its handlers between two instructions of the main thread. A signal that comes after the last instruction
before a wait, and before the system call that waits, interrupts nothing: the handler runs after the wait, which may be
never. A command that ends as soon as it has started meets just that moment. So a thread of its own reads what Python's
handler in C writes to a socket at once.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterable


class SignalFeed(threading.Thread):
    """Hands each signal over; several of one kind that come together may be one."""

    def __init__(self, numbers: Iterable[int], *, on_signal: Callable[[int], None]) -> None:
        """Changes nothing before `listen`.

        Args:
            numbers: The signals.
            on_signal: Is called with the number, by this thread.
        """
        super().__init__(name="signals", daemon=True)
        self._numbers = frozenset(numbers)
        self._on_signal = on_signal
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)

    def listen(self) -> None:
        """Takes the signals from now on. To be called by the main thread."""
        # Of signals that find the socket full, there are thousands to be read.
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, lambda number, _: None)
        self.start()

    def run(self) -> None:
        while received := self._read_end.recv(4096):
            for number in dict.fromkeys(received):
                if number in self._numbers:
                    self._on_signal(number)
