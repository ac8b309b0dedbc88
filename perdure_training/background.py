"""Threads that copy and answer beside a training, which comes first."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_NICE = 10
"""Priority of the threads that copy."""


def lower_thread_priority() -> None:
    """Lowers the priority of the calling thread, where the system has priorities of threads."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class ConnectionThreads:
    """Serves each connection of a socket in a thread of its own, with a low priority.

    Invariants:
        - A connection is closed once it is served, whatever serving it raises.
        - No more threads run than there may be connections: further ones are closed unheard, so that who opens many
          costs no memory, and who comes later is not left waiting.
    """

    def __init__(
        self, listening: socket.socket, serve: Callable[[socket.socket], None], *, most: int, name: str
    ) -> None:
        """Begins to accept.

        Args:
            listening: A socket that listens.
            serve: Serves one connection. An `OSError` says that the other side has gone.
            most: Connections at a time.
            name: The name of the threads.
        """
        self._listening = listening
        self._serve_one = serve
        self._free = threading.BoundedSemaphore(most)
        self._name = name
        threading.Thread(target=self._accept, name=f"{name}-listener", daemon=True).start()

    def close(self) -> None:
        """Takes no further connection."""
        with contextlib.suppress(OSError):
            # Wakes the thread that accepts, which closing alone does not.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name=self._name, daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        lower_thread_priority()
        try:
            with connection:
                self._serve_one(connection)
        except OSError as error:
            logger.debug("%s: a connection ended early: %s", self._name, error)
        except Exception:
            logger.exception("%s: a connection was not served", self._name)
        finally:
            self._free.release()
