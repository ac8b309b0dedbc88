"""What stand-ins, ranks and standbys tell the warm interpreter, and what it tells them: lines, with files."""

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

from ..agent_link.encoding import well_formed
from .learning import Learned

_LARGEST_PIECE = 1 << 20
_STANDARD_FILES = 3


@dataclass(frozen=True, kw_only=True)
class Request:
    """A rank that a stand-in wants started."""

    connection: socket.socket
    arguments: tuple[str, ...]
    environment: dict[str, str]
    context: dict[str, str]
    files: tuple[int, ...]
    """Standard input, output and error."""

    @property
    def local_rank(self) -> str:
        return self.environment.get("LOCAL_RANK", "0")

    def close(self) -> None:
        self.connection.close()
        for file in self.files:
            os.close(file)

    def pass_on(self, receiver: socket.socket) -> None:
        """Sends it, with all its files, to who becomes the rank. It is still to be closed here.

        Raises:
            OSError: if the receiver is gone.
        """
        fields = {"arguments": self.arguments, "environment": self.environment, "context": self.context}
        send(receiver, fields, files=(*self.files, self.connection.fileno()))


def read_message(connection: socket.socket) -> Request | Learned | None:
    """What a stand-in or a rank has sent; None for a peer that only waits for the answer.

    Raises:
        OSError, ValueError, KeyError, TypeError, IndexError: if it is none of these.
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
    """The request that was passed on; None where the other side is gone."""
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
    """Sends a line of JSON, and files.

    Raises:
        OSError: if the receiver is gone, or does not listen.
    """
    message = json.dumps(fields).encode() + b"\n"
    sent = socket.send_fds(connection, [message], files)
    if sent < len(message):
        connection.sendall(message[sent:])


def receive(connection: socket.socket, *, files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """A line of JSON, with at most so many files. Nothing where the sender has closed.

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
    """Sends the stand-in a line; one that is gone needs none."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{well_formed(line)}\n".encode())


def has_closed(connection: socket.socket) -> bool:
    """Whether the peer has stopped waiting for the answer."""
    gone = select.poll()
    gone.register(connection.fileno(), select.POLLRDHUP)
    return bool(gone.poll(0))


def log(text: str) -> None:
    """Not by `logging`, which is the script's to set up."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def leave_word(path: str, content: Mapping[str, object]) -> None:
    """Writes a file that others read, as JSON; best effort."""
    with contextlib.suppress(OSError):
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(f"{path}.new", path)
