"""Has another node keep copies of what this node's script saves (`checkpoint.watch` without a storage).

The job's group says which one: a replacement of this node is told the same one, and asks it for them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from perdure.agent.checkpoint.connections import Refused
from perdure.agent.checkpoint.copy_service import LONGEST_LINE, PIECE, SILENCE, CopyService
from perdure.agent.checkpoint.storage import LARGEST_RECORD
from perdure.agent.checkpoint.watched import Json, Pieces, WatchedFiles
from perdure.agent.config import AgentConfig
from perdure.contract.agents import CopyReceiver
from perdure.contract.commands import CopyTarget
from perdure_launcher.system.ports import PortPool
from perdure_training.snapshots.copies import RACK_VARIABLE

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_CONNECT_WITHIN = 10.0
WAITS_FOR_TARGET = 30.0
"""Seconds for which the command of a replaced node waits for the node that keeps its copies, if that is not reached.
It may have been lost together with this one."""


_NO_ANSWER = "the node that keeps the copies answered something else"


class TargetAway(OSError):
    """The node that keeps the copies is not known yet, or is not reached."""


class _Answer(BaseModel):
    """The first line of the other node's answer to a request; what it says depends on the request.

    One that is anything else says nothing about what that node keeps: it counts as a broken connection, so that no
    version is taken for damaged, and deleted, for it.
    """

    model_config = ConfigDict(strict=True)

    problem: str = ""
    missing: bool = False
    names: tuple[str, ...] | None = None
    size: NonNegativeInt | None = None
    length: NonNegativeInt | None = Field(default=None, validation_alias="bytes")
    """The number of bytes that follow."""
    checksum: NonNegativeInt | None = None

    def expect(self, value: _T | None) -> _T:
        """Returns what was requested.

        Raises:
            OSError: if the other node refuses, or answers something else.
        """
        if self.problem:
            raise OSError(f"the node that keeps the copies refuses: {self.problem}")
        if value is None:
            raise ConnectionError(_NO_ANSWER)
        return value


class PeerCopies:
    """Files in the memory of another node, as `watched.Files`. Any thread may use it."""

    def __init__(self, config: AgentConfig) -> None:
        """Creates the object; `start` opens the service for other nodes."""
        self._config = config
        self._owner = f"{config.node.role}-{config.node.rank}"
        self._lock = threading.Lock()
        self._target: CopyTarget | None = None
        self._service: CopyService | None = None

    def start(self) -> None:
        """Begins to keep copies for others, as far as this machine can."""
        config = self._config
        allowed = _allowed_ports(config.store_ports) if config.store_ports else None
        # The stores of worlds take allowed ports in turn from the first one on, the launcher's receiver the last.
        pool = PortPool(config.address, listening=True, allowed=allowed, start=-2, size=1)
        listening = None
        try:
            listening = pool.take(pool.numbers[0])
            self._service = CopyService(
                config.node, listening, folder=config.copies_dir, rack=os.environ.get(RACK_VARIABLE, "")
            )
        except (OSError, IndexError) as error:
            if listening is not None:
                listening.close()
            problem = error if listening is not None else pool.problem
            logger.warning("this node keeps no copies of what others save, and has none elsewhere: %s", problem)

    @property
    def receiver(self) -> CopyReceiver | None:
        """Where this node takes copies of others; None if it takes none."""
        return self._service.receiver if self._service is not None else None

    def close(self) -> None:
        """Deletes the copies of others: this node ends for good."""
        if self._service is not None:
            self._service.close()

    def hold(self, target: CopyTarget) -> bool:
        """Takes note of the node that keeps the copies; returns whether they are at another place than before."""
        with self._lock:
            before, self._target = self._target, target
        if before is None or before.place != target.place:
            logger.info("node %d keeps copies of what this node saves", target.rank)
            return True
        return False

    # As a storage

    def write(self, path: str, pieces: Pieces) -> tuple[int, int]:
        """Writes a file, and returns its size and its CRC-32 when it is there."""
        size = checksum = 0
        with self._ask(do="write", path=path, size=pieces.size) as (answer, connection, incoming):
            if answer.problem:
                raise Refused(f"{path.rpartition('/')[2]}: {answer.problem}")
            for piece in pieces:
                connection.sendall(piece)
                size += len(piece)
                checksum = zlib.crc32(piece, checksum)
            if size < pieces.size:
                raise ValueError(f"{path} ends after {size:,} of {pieces.size:,} bytes")
            stored = _read_answer(incoming)
            if (stored.size, stored.checksum) != (size, checksum):
                raise OSError(f"{path} was not copied as it is: {stored.problem or 'its checksum differs'}")
        return size, checksum

    def read(self, path: str) -> bytes:
        """Reads a small file.

        Raises:
            ValueError: if it is large.
        """
        content = b"".join(self.pieces(path, offset=0, length=LARGEST_RECORD + 1, piece=PIECE))
        if len(content) > LARGEST_RECORD:
            raise ValueError(f"{path} has more than {LARGEST_RECORD:,} bytes")
        return content

    def pieces(self, path: str, *, offset: int, length: int, piece: int) -> Iterator[bytes]:
        """Reads a part of a file in pieces of so many bytes; ends early if the file does."""
        with self._ask(do="read", path=path, offset=offset, length=length) as (answer, _, incoming):
            left = answer.expect(answer.length)
            if left > length:
                raise ConnectionError(f"{path}: {left:,} bytes were announced, and {length:,} requested")
            while left > 0:
                content = incoming.read(min(piece, left))
                if not content:
                    raise ConnectionError(f"{path}: the last {left:,} bytes did not arrive")
                left -= len(content)
                yield content

    def size(self, path: str) -> int:
        """The size of a file."""
        with self._ask(do="size", path=path) as (answer, *_):
            return answer.expect(answer.size)

    def names(self, folder: str) -> set[str]:
        """The names in a folder; empty if there is no such folder."""
        with self._ask(do="names", path=folder) as (answer, *_):
            return set(answer.expect(answer.names))

    def remove(self, folder: str, *, first: str) -> None:
        """Deletes a folder, beginning with the file that makes it count."""
        with self._ask(do="remove", path=folder, first=first) as (answer, *_):
            answer.expect(True)

    @contextmanager
    def _ask(self, **request: Any) -> Generator[tuple[_Answer, socket.socket, socket.SocketIO]]:
        with self._lock:
            target = self._target
        if target is None:
            raise TargetAway("no other node is known yet that keeps its copies")
        try:
            connection = socket.create_connection((target.address, target.port), timeout=_CONNECT_WITHIN)
        except (OSError, OverflowError) as error:
            raise TargetAway(f"node {target.rank}, which keeps its copies, is not reached: {error}") from error
        with connection, connection.makefile("rb") as incoming:
            connection.settimeout(SILENCE)
            fields = {"owner": self._owner, "token": target.token} | request
            connection.sendall(json.dumps(fields).encode() + b"\n")
            answer = _read_answer(incoming)
            if answer.missing:
                raise FileNotFoundError(str(request["path"]))
            yield answer, connection, cast("socket.SocketIO", incoming)


class WatchedOnNodes(WatchedFiles):
    """The versions of one node, in the memory of another one."""

    def __init__(self, peers: PeerCopies, config: AgentConfig, *, keep_last: int) -> None:
        super().__init__(peers, config.node, keep_last=keep_last, scarce=True)
        self._incarnation = config.node.incarnation
        self._away_since: float | None = None

    def handle(self, request: Json, files: Sequence[int]) -> Json | tuple[int, Iterator[bytes]]:
        """As the base class does, but a command does not wait for a node that stays away."""
        if request.get("do") != "choose":
            return super().handle(request, files)
        nothing = json.dumps([]).encode()
        if self._incarnation == 1:
            # No other had this place before, so there is nothing to wait for.
            return len(nothing), iter([nothing])
        try:
            answer = super().handle(request, files)
        except OSError as error:
            now = time.monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            if now - self._away_since < WAITS_FOR_TARGET:
                raise
            logger.warning("what the script has saved is not restored: %s", error)
            return len(nothing), iter([nothing])
        self._away_since = None
        return answer


def _read_answer(incoming: Any) -> _Answer:
    line = incoming.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise ConnectionError("the node that keeps the copies closed the connection")
    try:
        return _Answer.model_validate_json(line)
    except ValidationError as error:
        raise ConnectionError(_NO_ANSWER) from error


def _allowed_ports(store_ports: str) -> range:
    from perdure.spec.network import read_ports

    return read_ports(store_ports)
