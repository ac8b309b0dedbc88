"""Delivers signals as events, without losing any, whatever the main thread does.

Python runs its handlers between two instructions of the main thread. A signal that arrives after the last instruction
before a blocking system call does not interrupt it, so the handler runs after the wait, possibly never. A command that
ends right after its start causes exactly this. So a separate thread reads the socket that Python's C handler writes to
at once.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterable


class SignalFeed(threading.Thread):
    """Reports each signal; several signals of one kind that arrive together may be reported as one."""

    def __init__(self, numbers: Iterable[int], *, on_signal: Callable[[int], None]) -> None:
        """Creates the feed; `listen` installs it.

        Args:
            numbers: The signals.
            on_signal: Called with the number, in this thread.
        """
        super().__init__(name="signals", daemon=True)
        self._numbers = frozenset(numbers)
        self._on_signal = on_signal
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)

    def listen(self) -> None:
        """Handles the signals from now on, also those that the parent of this process has blocked. Call it in the main
        thread."""
        # Programs inherit the mask, too: a rank that never receives SIGTERM would not save.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # If the socket is full, it already holds thousands of unread signals.
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, lambda number, _: None)
        self.start()

    def run(self) -> None:
        while received := self._read_end.recv(4096):
            for number in dict.fromkeys(received):
                if number in self._numbers:
                    self._on_signal(number)
