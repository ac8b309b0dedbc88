"""Keeps copies of what the scripts of other nodes have saved, in this node's memory, and gives them back.

Each connection carries one request, a line of JSON: `owner` (the node's role and rank), `token`, `do`, and `path` below
the owner's folder. The answer is a line of JSON. After that of `read` its bytes follow. After the first one of `write`
the owner sends the bytes, and a second line answers them. docs/node-protocol.md describes both sides.

The token is derived from this incarnation's own for that one owner (`copies_token`), so a node reaches its own copies
only, and one that replaces it the same ones. The bytes travel in the clear, as those of gloo and NCCL do.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final, cast

from perdure.agent.checkpoint.storage import Storage
from perdure.contract.agents import CopyReceiver
from perdure.contract.identity import NodeCredentials
from perdure.workflows.policy.checkpoints.copies import copies_token
from perdure_launcher.system.memory_folder import COPIES_PREFIX, ROOT, MemoryFolder
from perdure_training.background import ConnectionThreads

Json = dict[str, Any]

PIECE: Final = 1 << 22
"""Bytes that are sent or received at once."""
LONGEST_LINE: Final = 1 << 20
"""Bytes of a line: names in a folder with thousands of entries."""
SILENCE: Final = 30.0
"""Seconds without a byte after which a connection is given up."""
_LONGEST_REQUEST = 8192
_INTRODUCTION = 5.0
"""Seconds within which a new connection must ask."""
_CONNECTIONS = 32
"""Connections at a time; a further one ends the oldest that has not asked yet. A node has one or two, and keeps the
copies of a few others."""
_LONGEST_PATH = 1200
_OWNER = re.compile(r"([a-z0-9][a-z0-9-]{0,62})-(\d{1,7})")
_LARGEST = 1 << 50


class NotKept(Exception):
    """A request is refused; the message says why."""


class CopyService:
    """The copies that one node keeps for others.

    Invariants:
        - Without the owner's token nothing is read, written or deleted, and with it only what is in the owner's folder.
        - A file is there as a whole or not at all.
        - What others need of a memory that is shared is left to them.
    """

    def __init__(
        self, node: NodeCredentials, listening: socket.socket, *, folder: Path | None = None, rack: str = ""
    ) -> None:
        """Begins to take requests.

        Args:
            node: The node that keeps the copies.
            listening: A socket that listens.
            folder: A folder in memory of its own; None for the machine's shared memory, half of which stays free.
            rack: The node's rack, if it is known.

        Raises:
            OSError: if there is no memory folder.
        """
        self._node = node
        self._shared = folder is None
        # An agent that was killed finds its folder again. Nobody else takes it over.
        self._memory = MemoryFolder(folder or ROOT, node=node.path, prefix=COPIES_PREFIX)
        self._files = Storage(str(self._memory.path))
        self._room = threading.Lock()
        self._coming = 0
        """Bytes of files that are being written."""
        self.receiver = CopyReceiver(
            port=cast("int", listening.getsockname()[1]), folder=self._memory.path.name, rack=rack
        )
        self._connections = ConnectionThreads(listening, self._serve, most=_CONNECTIONS, name="copies")

    def close(self) -> None:
        """Takes no further request, and deletes the copies."""
        self._connections.close()
        self._memory.remove()

    def _serve(self, connection: socket.socket, introduced: Callable[[], None]) -> None:
        with connection.makefile("rb") as incoming:
            connection.settimeout(_INTRODUCTION)
            line = incoming.readline(_LONGEST_REQUEST)
            connection.settimeout(SILENCE)
            if line.endswith(b"\n"):
                self._answer(line, connection, cast("socket.SocketIO", incoming), introduced)

    def _answer(
        self, line: bytes, connection: socket.socket, incoming: socket.SocketIO, introduced: Callable[[], None]
    ) -> None:
        bytes_follow = False

        def send(answer: Json) -> None:
            connection.sendall(json.dumps(answer).encode() + b"\n")

        try:
            request = _parse(line)
            path = f"{self._owner(request)}/{request['path']}".rstrip("/")
            introduced()
            match request["do"]:
                case "names":
                    send({"names": sorted(self._files.names(path))})
                case "size":
                    send({"size": self._files.size(path)})
                case "read":
                    offset, length = _number(request, "offset"), _number(request, "length")
                    length = max(0, min(length, self._files.size(path) - offset))
                    pieces = self._files.pieces(path, offset=offset, length=length, piece=PIECE)
                    bytes_follow = True
                    send({"bytes": length})
                    for piece in pieces:
                        connection.sendall(piece)
                case "write":
                    size = _number(request, "size")
                    coming = _receive(incoming, size)
                    with self._taking(size):
                        send({})
                        try:
                            size, checksum = self._write(path, coming)
                        except OSError:
                            # The owner reads an answer once it has sent everything.
                            for _ in coming:
                                pass
                            raise
                    send({"size": size, "checksum": checksum})
                case "remove":
                    self._files.remove(path, first=_name(request, "first"))
                    send({})
                case other:
                    raise NotKept(f"do: {str(other)[:40]!r} is unknown")
        except FileNotFoundError:
            send({"missing": True})
        except (NotKept, ValueError, KeyError, TypeError, RecursionError) as error:
            send({"problem": str(error) or type(error).__name__})
        except OSError as error:
            if bytes_follow or isinstance(error, ConnectionError | TimeoutError):
                raise
            # Of the memory, as where others have filled it since its room was looked at.
            send({"problem": f"node {self._node.rank}: {error.strerror or error}"})

    def _owner(self, request: Json) -> str:
        """The folder of the owner that the request proves to be from."""
        match = _OWNER.fullmatch(str(request.get("owner")))
        role, rank = (match[1], int(match[2])) if match else ("", 0)
        token = copies_token(self._node.token, role=role, rank=rank)
        if not hmac.compare_digest(str(request.get("token")).encode(errors="replace"), token.encode()) or not match:
            raise NotKept("the token is not the owner's for this node")
        return f"{role}-{rank}"

    @contextlib.contextmanager
    def _taking(self, size: int) -> Generator[None]:
        """Reserves room for a file."""
        with self._room:
            self._memory.renew()
            known = os.statvfs(self._memory.path)
            total, free = known.f_blocks * known.f_frsize, known.f_bavail * known.f_frsize
            left = free - self._coming - (total // 2 if self._shared else 0)
            if size > left:
                kind = "half of it stays free for others" if self._shared else "it has no other content"
                raise NotKept(
                    f"{size:,} bytes do not fit into the {total:,} bytes of memory of node {self._node.rank} ({kind}): "
                    "give it more memory, keep fewer saves with checkpoint.keep_last, or set checkpoint.storage"
                )
            self._coming += size
        try:
            yield
        finally:
            with self._room:
                self._coming -= size

    def _write(self, path: str, pieces: Iterator[bytes]) -> tuple[int, int]:
        try:
            return self._files.write(path, pieces)
        except BaseException:
            place, _, name = path.rpartition("/")
            with contextlib.suppress(OSError):
                (self._memory.path / place / name).unlink()
            raise


def _parse(line: bytes) -> Json:
    request = json.loads(line)
    if not isinstance(request, dict):
        raise NotKept("expected an object")
    known = cast("Json", request)
    path = known.get("path")
    if not isinstance(path, str) or len(path) > _LONGEST_PATH or "\0" in path:
        raise NotKept("path: expected a text")
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise NotKept(f"path: expected names separated by '/', found {path[:120]!r}")
    if not path and known.get("do") != "names":
        raise NotKept("path: expected names separated by '/', found none")
    return known


def _number(request: Json, name: str) -> int:
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise NotKept(f"{name}: expected a whole number from 0 on, found {str(value)[:40]!r}")
    return value


def _name(request: Json, field: str) -> str:
    value = request.get(field)
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value) or value in (".", ".."):
        raise NotKept(f"{field}: expected a name, found {str(value)[:40]!r}")
    return value


def _receive(incoming: socket.SocketIO, size: int) -> Iterator[bytes]:
    while size:
        piece = incoming.read(min(PIECE, size))
        if not piece:
            raise ConnectionError(f"{size:,} bytes did not arrive")
        size -= len(piece)
        yield piece
