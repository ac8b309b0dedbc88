"""Threads that copy and answer beside a training, which comes first."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial

logger = logging.getLogger(__name__)

_NICE = 10
"""Priority of the threads that copy."""
_MAKES_ROOM = 5.0
"""Seconds within which the thread of a connection that was ended has ended, on a machine whose ranks compute."""

Serve = Callable[[socket.socket, Callable[[], None]], None]
"""Serves a connection; the second argument is called once its other side has proved who it is."""


def lower_thread_priority() -> None:
    """Lowers the priority of the calling thread, where the system has priorities of threads."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Strangers:
    """Connections whose other side has not proved yet who it is. The oldest one ends where a new one needs its place:
    those who know the secret prove it at once, so who opens many in silence keeps no one else out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: socket.socket) -> None:
        """Takes in a new connection."""
        with self._lock:
            self._waiting[connection] = None

    def remove(self, connection: socket.socket) -> None:
        """Takes out a connection that has proved itself, or has ended."""
        with self._lock:
            self._waiting.pop(connection, None)

    def end_oldest(self) -> bool:
        """Ends the oldest connection, whose thread notices it; returns whether there was one."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
        with contextlib.suppress(OSError):
            # Wakes the thread that reads, which closing alone does not.
            oldest.shutdown(socket.SHUT_RDWR)
        return True


class ConnectionThreads:
    """Serves each connection of a socket in a thread of its own, with a low priority.

    Invariants:
        - A connection is closed once it is served, whatever serving it raises.
        - No more threads run than there may be connections: a further one takes the place of the oldest stranger's, or
          is closed unheard, so that who opens many costs no memory, and who comes later is not left waiting.
    """

    def __init__(self, listening: socket.socket, serve: Serve, *, most: int, name: str) -> None:
        """Begins to accept.

        Args:
            listening: A socket that listens.
            serve: Serves one connection, and calls its second argument once the other side has proved who it is. An
                `OSError` says that the other side has gone.
            most: Connections at a time.
            name: The name of the threads.
        """
        self._listening = listening
        self._serve_one = serve
        self._free = threading.BoundedSemaphore(most)
        self._strangers = Strangers()
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
            if not self._free.acquire(blocking=False) and not self._make_room():
                connection.close()
                continue
            self._strangers.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name=self._name, daemon=True).start()

    def _make_room(self) -> bool:
        """Takes the place of a stranger's connection; returns whether there was one."""
        return self._strangers.end_oldest() and self._free.acquire(timeout=_MAKES_ROOM)

    def _serve(self, connection: socket.socket) -> None:
        lower_thread_priority()
        try:
            with connection:
                self._serve_one(connection, partial(self._strangers.remove, connection))
        except OSError as error:
            logger.debug("%s: a connection ended early: %s", self._name, error)
        except Exception:
            logger.exception("%s: a connection was not served", self._name)
        finally:
            self._strangers.remove(connection)
            self._free.release()
