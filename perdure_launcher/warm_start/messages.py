"""Messages between the warm interpreter and shims, ranks and standbys: lines of JSON, with file descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from perdure_training.node_api.local_rank import local_rank_of
from perdure_training.node_api.text import well_formed

from ..system.files import write_file
from .learning import Learned

_LARGEST_PIECE = 1 << 20
_STANDARD_FILES = 3


@dataclass(frozen=True, kw_only=True)
class Request:
    """A shim's request to start a rank."""

    connection: socket.socket
    arguments: tuple[str, ...]
    environment: dict[str, str]
    context: dict[str, str]
    files: tuple[int, ...]
    """Standard input, output and error."""

    @property
    def local_rank(self) -> str:
        return str(local_rank_of(self.environment))

    def close(self) -> None:
        self.connection.close()
        for file in self.files:
            os.close(file)

    def pass_on(self, receiver: socket.socket) -> None:
        """Sends the request with all its files to the process that becomes the rank. The caller still has to close it.

        Raises:
            OSError: if the receiver is gone.
        """
        fields = {"arguments": self.arguments, "environment": self.environment, "context": self.context}
        send(receiver, fields, files=(*self.files, self.connection.fileno()))


def read_message(connection: socket.socket) -> Request | Learned | None:
    """Reads the message of a shim or a rank; None for a peer that only waits for the answer.

    Raises:
        OSError, ValueError, KeyError, TypeError, IndexError: if it is not a valid message.
    """
    fields, files = receive(connection, files=_STANDARD_FILES)
    try:
        if not fields:
            return None
        if learned := fields.get("learned"):
            return Learned.from_json(learned)
        return _request(fields, files, connection)
    except (ValueError, KeyError, TypeError, IndexError):
        for file in files:
            os.close(file)
        raise


def read_passed_on(control: socket.socket) -> Request | None:
    """Reads a request that was passed on; None if the other side has closed."""
    fields, files = receive(control, files=_STANDARD_FILES + 1)
    if not fields:
        return None
    *standard, connection = files
    return _request(fields, standard, socket.socket(fileno=connection))


def _request(fields: dict[str, Any], files: list[int], connection: socket.socket) -> Request:
    return Request(
        connection=connection,
        arguments=tuple(fields["arguments"]),
        environment=fields["environment"],
        context=fields["context"],
        files=(files[0], files[1], files[2]),
    )


def send(connection: socket.socket, fields: Mapping[str, object], *, files: tuple[int, ...] = ()) -> None:
    """Sends a line of JSON and file descriptors.

    Raises:
        OSError: if the receiver is gone or does not read.
    """
    message = json.dumps(fields).encode() + b"\n"
    sent = socket.send_fds(connection, [message], files)
    if sent < len(message):
        connection.sendall(message[sent:])


def receive(connection: socket.socket, *, files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receives a line of JSON with at most `files` descriptors; empty if the sender has closed.

    Raises:
        OSError, ValueError: if it cannot be read.
    """
    text, received, _, _ = socket.recv_fds(connection, _LARGEST_PIECE, files)
    while text and not text.endswith(b"\n"):
        piece = connection.recv(_LARGEST_PIECE)
        if not piece:
            break
        text += piece
    try:
        return cast("dict[str, Any]", json.loads(text or b"{}")), received
    except ValueError:
        for file in received:
            os.close(file)
        raise


def answer(connection: socket.socket, line: str) -> None:
    """Sends the shim a line; ignores a shim that is gone."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{well_formed(line)}\n".encode())


def has_closed(connection: socket.socket) -> bool:
    """Returns whether the peer has stopped waiting for the answer."""
    gone = select.poll()
    gone.register(connection.fileno(), select.POLLRDHUP)
    return bool(gone.poll(0))


def log(text: str) -> None:
    """Writes a log line without `logging`, whose configuration belongs to the script."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_record(path: str, content: Mapping[str, object]) -> None:
    """Writes a JSON file for other processes; errors are ignored."""
    with contextlib.suppress(OSError):
        write_file(path, json.dumps(content))
