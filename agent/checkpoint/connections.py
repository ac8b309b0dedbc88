"""The socket through which ranks reach the storage: `saves.sock` in the run directory, described in
docs/node-protocol.md.

Requests take as long as the storage does, so each connection has a thread. Ranks may run as another user; what they
send in a loop costs threads up to a limit, and the agent's own work none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from perdure.agent.sockets import listen_beneath

logger = logging.getLogger(__name__)

_CONNECTIONS = 128
"""Connections at a time; further ones wait. A rank has one or two."""
_LONGEST_LINE = 64 * 1024
_FILES = 3
_PATIENCE = 30.0
"""Seconds in which a client must send its request, and read each part of the answer."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Content:
    """An answer that bytes follow."""

    size: int
    pieces: Iterator[bytes]


Answer = Json | Content


class Refused(Exception):
    """A request cannot be carried out; the message says why."""


Handler = Callable[[Json, Sequence[int]], Answer]


class CheckpointSocket:
    """Accepts connections, and answers one request on each."""

    def __init__(self, path: Path, handle: Handler) -> None:
        """Creates the object.

        Args:
            path: The socket.
            handle: Carries out a request with the files that came with it, in a thread of its own. It raises `Refused`.
        """
        self._path = path
        self._handle = handle
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Starts to listen, in threads that end with the process. Replaces the socket of an earlier agent."""
        self._listener = listener = listen_beneath(self._path.parent, self._path.name, backlog=_CONNECTIONS)
        threading.Thread(target=self._accept, args=(listener,), name="checkpoint-socket", daemon=True).start()

    def close(self) -> None:
        """Takes no further connection."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                # Wakes the thread that accepts, which closing alone does not.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._listener is not listener:
                    return
                logger.error("checkpoints cannot be stored any more: %s", error)
                return
            threading.Thread(target=self._serve, args=(connection,), name="checkpoint", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        files: list[int] = []
        try:
            with connection:
                connection.settimeout(_PATIENCE)
                self._answer(connection, files)
        except OSError as error:
            logger.debug("a rank has closed its connection: %s", error)
        except Exception:
            logger.exception("a request about checkpoints was not answered")
        finally:
            for file in files:
                with contextlib.suppress(OSError):
                    os.close(file)
            self._free.release()

    def _answer(self, connection: socket.socket, files: list[int]) -> None:
        line, received, _, _ = socket.recv_fds(connection, _LONGEST_LINE, _FILES, socket.MSG_CMSG_CLOEXEC)
        files += received
        while not line.endswith(b"\n"):
            more = connection.recv(_LONGEST_LINE)
            if not more or len(line) + len(more) > _LONGEST_LINE:
                return
            line += more
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise Refused("expected an object")
            answer = self._handle(cast("Json", request), files)
        except (Refused, ValueError, KeyError, TypeError, FileNotFoundError) as error:
            answer = {"problem": str(error) or type(error).__name__}
        except Exception as error:
            # The libraries of storages raise errors of their own. They say nothing about what is stored.
            answer = {"problem": f"{type(error).__name__}: {error}", "retry": True}
        if not isinstance(answer, Content):
            connection.sendall(json.dumps(answer).encode() + b"\n")
            return
        connection.sendall(json.dumps({"bytes": answer.size}).encode() + b"\n")
        for piece in answer.pieces:
            connection.sendall(piece)
