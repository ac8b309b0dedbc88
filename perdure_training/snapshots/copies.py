"""Copies of snapshots in the memory of other nodes, sent over TCP: from the rank that saved to the launcher of another
node, which outlives its ranks.

A sender knows the receiver's token, which the ranks of a world tell each other over the store of their generation. A
receiver only takes: no request returns a snapshot. The bytes travel in the clear, as gloo's and NCCL's do.

The sender asks with one line of JSON (`_Request`), then sends the snapshot's bytes. Each is answered by a line:
empty, or the reason why the copy is not taken. A receiver that has the same copy answers the first line by `held`, and
gets no bytes: to write them again would leave no copy until all have arrived. A connection carries any number of
copies.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from perdure_training.background import ConnectionThreads
from perdure_training.snapshots import arena
from perdure_training.snapshots.arena import Arena, Header, NoRoom, Slot

RACK_VARIABLE = "PERDURE_RACK"
"""Variable that names the node's rack, or whatever part of the site fails at once; unset where that is unknown."""
_NUMBERS = ("step", "rank", "world_size", "generation", "index_at", "size", "checksum", "restores")
_FOLDER = re.compile(r"stage-\d{1,9}/[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HELD = "held"
"""The answer of a receiver that has the same copy."""
_LONGEST_LINE = 4096
_CONNECTIONS = 64
"""Senders at once: the ranks of the nodes that copy to this one."""
_INTRODUCTION = 5.0
"""Seconds within which a new connection must ask."""
_SILENCE = 30.0
"""Seconds without a byte, in the middle of a copy, after which a connection is given up."""
_SLOWEST = 1 << 25
"""Bytes a second for which a receiver takes memory and computes the checksum, at least: its threads come after the
training. A sender waits for each answer so much longer."""
_LONGEST_ANSWER = 3600.0
_PIECE = 1 << 22
"""Bytes sent or read at once."""
_KEPT_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Has a side notice within 90 s, instead of two hours, that the other machine is gone: a thread waits for it there."""


class Refused(Exception):
    """The receiver does not take a copy; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ReceiverAddress:
    """Where copies are sent to, and the token that is asked for there."""

    host: str
    port: int
    token: str

    def dump(self) -> str:
        """The text for an environment variable, or a store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> ReceiverAddress:
        """Reads what `dump` has written.

        Raises:
            ValueError: if it is anything else.
        """
        try:
            said: dict[str, Any] = dict(json.loads(text))
            # A later release may say more.
            address = cls(**{field.name: said[field.name] for field in fields(cls)})
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"expected host, port and token, found {text[:120]!r}") from error
        host, port, token = address.host, address.port, address.token
        if not (isinstance(host, str) and isinstance(token, str) and isinstance(port, int) and 0 < port < 1 << 16):
            raise ValueError(f"expected host, port and token, found {text[:120]!r}")
        return address


@dataclass(frozen=True, kw_only=True)
class _Request:
    receiver_token: str
    folder: str
    """The arena, relative to the node's memory folder."""
    slot: int
    header: Header
    crc32: int
    """The checksum of the bytes: a receiver has no torch, and cannot compute the checksum of the header."""


class CopyReceiver:
    """Takes copies into the memory folder of this node.

    Invariants:
        - Without the token nothing is written.
        - A copy is valid only if all its bytes have arrived and match their CRC-32.
        - A valid copy that is sent again stays valid.
        - Nothing outside of the folder is written.
    """

    def __init__(self, folder: Path, listening: socket.socket, *, host: str, slots: int = 4) -> None:
        """Begins to take copies.

        Args:
            folder: The node's memory folder.
            listening: A socket that listens.
            host: The address at which other nodes reach the socket.
            slots: The number of snapshots of each rank.
        """
        self._folder = folder
        self._slots = slots
        port = cast("int", listening.getsockname()[1])
        self.address = ReceiverAddress(host=host, port=port, token=secrets.token_urlsafe(32))
        self._connections = ConnectionThreads(listening, self._serve, most=_CONNECTIONS, name="copy")

    def close(self) -> None:
        """Takes no further connection."""
        self._connections.close()

    def _serve(self, connection: socket.socket, introduced: Callable[[], None]) -> None:
        with connection.makefile("rb", buffering=0) as incoming:
            _keep_alive(connection)
            connection.settimeout(_INTRODUCTION)
            while (line := _read_line(incoming)) is not None:
                connection.settimeout(_SILENCE)
                refusal = self._take(line, connection, incoming, introduced)
                connection.sendall(refusal.encode() + b"\n")
                if refusal:
                    return
                # The next step may be long in coming.
                connection.settimeout(None)

    def _take(
        self, line: bytes, connection: socket.socket, incoming: socket.SocketIO, introduced: Callable[[], None]
    ) -> str:
        """Receives one copy; returns why not, or an empty text."""
        try:
            request = _parse(line, slots=self._slots)
        except ValueError as error:
            return f"no request: {error}"
        if not hmac.compare_digest(request.receiver_token.encode(errors="replace"), self.address.token.encode()):
            return "the token is not this receiver's"
        introduced()
        header = request.header
        world_size = None if header.replicated else header.world_size
        try:
            slot = Arena(self._folder / request.folder).slot(header.rank, request.slot, world_size=world_size)
        except OSError as error:
            return f"the memory folder cannot be used: {error}"
        if _holds(slot, request):
            # It was loaded once more since.
            slot.finish(header)
            connection.sendall(f"{_HELD}\n".encode())
            return ""
        try:
            content = slot.begin(header.size)
        except (NoRoom, OSError) as error:
            with contextlib.suppress(OSError):
                slot.clear()
            return str(error)
        connection.sendall(b"\n")
        received = 0
        while received < header.size:
            count = incoming.readinto(content[received : received + _PIECE])
            if not count:
                raise ConnectionError(f"{received:,} of {header.size:,} bytes arrived")
            received += count
        if arena.crc32(content) != request.crc32:
            slot.clear()
            return f"step {header.step} of rank {header.rank} was damaged on its way"
        slot.finish(header)
        return ""


class CopySender:
    """A connection to the receiver of another node."""

    def __init__(self, address: ReceiverAddress, *, folder: str) -> None:
        """Creates the object; the first copy connects.

        Args:
            address: The receiver.
            folder: The arena, relative to the memory folder.
        """
        self._address = address
        self._folder = folder
        self._connection: socket.socket | None = None

    def send(self, header: Header, content: memoryview, *, slot: int, crc32: int) -> None:
        """Copies a snapshot into the slot of this number, and waits until it is valid there.

        Raises:
            Refused: if the receiver does not take it.
            OSError: if the receiver is not reached, or the connection breaks.
        """
        request = _Request(
            receiver_token=self._address.token,
            folder=self._folder,
            slot=slot,
            header=header,
            crc32=crc32,
        )
        line = json.dumps(asdict(request) | {"header": request.header.fields()}).encode() + b"\n"
        patience = min(_SILENCE + header.size / _SLOWEST, _LONGEST_ANSWER)
        try:
            connection, answer = self._request(line, patience)
            with connection.makefile("rb", buffering=0) as incoming:
                if answer != _HELD:
                    # A timeout is for one call: all bytes may take longer.
                    connection.settimeout(_SILENCE)
                    for begin in range(0, header.size, _PIECE):
                        connection.sendall(content[begin : begin + _PIECE])
                    connection.settimeout(patience)
                _expect_consent(incoming)
        except (OSError, Refused):
            self.close()
            raise

    def _request(self, line: bytes, patience: float) -> tuple[socket.socket, str]:
        """Sends a request; returns the connection and the answer. One that was lost since the last copy is replaced."""
        if self._connection is not None:
            try:
                return self._connection, _ask(self._connection, line, patience)
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    # It has not answered. One that was lost without a word has the system's number.
                    raise
                self.close()
        self._connection = socket.create_connection((self._address.host, self._address.port), timeout=_SILENCE)
        _keep_alive(self._connection)
        return self._connection, _ask(self._connection, line, patience)

    def close(self) -> None:
        """Closes the connection; the next copy opens one again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEPT_ALIVE.items():
        # Not every system has all of them.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _ask(connection: socket.socket, line: bytes, patience: float) -> str:
    connection.settimeout(patience)
    connection.sendall(line)
    with connection.makefile("rb", buffering=0) as incoming:
        return _expect_consent(incoming)


def _read_line(incoming: socket.SocketIO) -> bytes | None:
    """Reads a line without its end; None at the end of the connection."""
    line = incoming.readline(_LONGEST_LINE)
    if not line.endswith(b"\n"):
        return None
    return line[:-1]


def _expect_consent(incoming: socket.SocketIO) -> str:
    line = _read_line(incoming)
    if line is None:
        raise ConnectionError("the receiver closed the connection")
    answer = line.decode(errors="replace")
    if answer not in ("", _HELD):
        raise Refused(answer)
    return answer


def _holds(slot: Slot, request: _Request) -> bool:
    """Whether a slot has the requested copy, undamaged."""
    held = slot.header()
    if held is None or replace(held, restores=request.header.restores) != request.header:
        return False
    try:
        return arena.crc32(slot.read()) == request.crc32
    except OSError:
        return False


def _parse(line: bytes, *, slots: int) -> _Request:
    try:
        fields: dict[str, Any] = dict(json.loads(line))
        header: dict[str, Any] = dict(fields.pop("header"))
        token, folder = fields.get("receiver_token"), fields.get("folder")
        numbers = {name: fields.get(name) for name in ("slot", "crc32")} | {name: header.get(name) for name in _NUMBERS}
        request = _Request(**fields, header=Header(**header))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if request.header.reported is not None:
        numbers["reported"] = request.header.reported
    if not isinstance(token, str):
        raise ValueError("receiver_token: expected a text")
    if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
        raise ValueError("folder: expected stage-N/NAME")
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}: expected a whole number from 0 on, found {value!r}")
    if request.slot >= slots:
        raise ValueError(f"slot: expected less than {slots}, found {request.slot}")
    return request
