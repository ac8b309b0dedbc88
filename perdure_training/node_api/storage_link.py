"""How ranks and the launcher reach the storage for checkpoints: through the agent of its node, over a Unix socket.

The agent has the credentials and the libraries of the storage; the user's image needs neither. A request is one line of
JSON, sent together with open files where the agent is to copy from them; the answer is one line, which bytes may
follow. docs/node-protocol.md describes them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perdure_training.node_api.agent_client import Json, connect, pauses
from perdure_training.node_api.layout import CHECKPOINT_DESIRED, CHECKPOINT_SOCKET
from perdure_training.node_api.rank_environment import run_directory_of

logger = logging.getLogger(__name__)

_CONNECT_WITHIN = 10.0
"""Seconds: the agent accepts connections at once, or is away."""
_LONGEST_LINE = 1 << 20
_PIECE = 1 << 22


class StorageAway(Exception):
    """The agent did not answer, or could not reach the storage; the same request can be sent again."""


class StorageProblem(Exception):
    """The agent cannot do what was requested; the message says why."""


class CheckpointsUnusable(Exception):
    """The storage has checkpoints, and none of them can be loaded; the message names each with its damage."""


class StateLost(Exception):
    """A newer state than all that can be loaded existed, and the job does not go on without it: the message says which
    and why."""


class StorageLink:
    """The agent's part in checkpoints. Each request has a connection of its own, so any thread may send one."""

    def __init__(self, run_directory: Path) -> None:
        """Creates the object.

        Args:
            run_directory: The folder that the node's processes share.
        """
        self._socket = run_directory / CHECKPOINT_SOCKET
        self._file = run_directory / CHECKPOINT_DESIRED
        self._read_at = -1
        self._known: Json = {}

    def desired(self) -> Json:
        """Returns the desired state: `request` grows with each checkpoint that is requested, `answered` is the newest
        request that a durable one answers, `interval_s` is the time between two where the job chooses it. Costs a
        system call, unless there is news."""
        try:
            changed = os.stat(self._file).st_mtime_ns
            if changed != self._read_at:
                self._known = json.loads(self._file.read_bytes())
                self._read_at = changed
        except (OSError, ValueError):
            return self._known
        return self._known

    def ask(self, request: Json, *, files: Sequence[int] = (), within: float | None) -> Json:
        """Sends one request, and returns the answer.

        Args:
            request: The request.
            files: Open files that go with it.
            within: Seconds to wait for the answer; None for as long as the agent lives.

        Raises:
            StorageAway: if there was no answer.
            StorageProblem: if the agent cannot do it.
        """
        return self._exchange(request, files, within)[0]

    def read(self, request: Json, *, patience: float) -> bytearray:
        """Sends a request whose answer is bytes, and returns them. Insists and raises as `insist` does."""
        return self._insist(request, patience)[1]

    def stream(self, request: Json, take: Callable[[memoryview], object]) -> None:
        """Sends a request whose answer is bytes, and hands these over piece by piece.

        Raises:
            StorageAway: if there was no answer, or it ended early.
            StorageProblem: if the agent cannot do it.
        """
        self._exchange(request, (), None, take)

    def insist(self, request: Json, *, patience: float) -> Json:
        """Sends a request until the agent answers it: it may be starting again, or the storage be away.

        Raises:
            StorageAway: if it did not answer within `patience` seconds.
            StorageProblem: if the agent cannot do it.
        """
        return self._insist(request, patience)[0]

    def _insist(self, request: Json, patience: float) -> tuple[Json, bytearray]:
        until, warned = time.monotonic() + patience, set[str]()
        attempts = pauses()
        while True:
            try:
                return self._exchange(request, (), None)
            except StorageAway as error:
                if time.monotonic() >= until:
                    raise
                if str(error) not in warned:
                    # The connection ends where the storage hangs, and the next answer says so.
                    logger.warning("perdure: waits for the storage of checkpoints: %s", error)
                warned.add(str(error))
                time.sleep(next(attempts))

    def _exchange(
        self,
        request: Json,
        files: Sequence[int],
        within: float | None,
        take: Callable[[memoryview], object] | None = None,
    ) -> tuple[Json, bytearray]:
        try:
            with connect(self._socket, within=_CONNECT_WITHIN) as connection:
                line = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(connection, [line], list(files)) if files else 0
                if sent < len(line):
                    # To send nothing fails, too, where the agent has answered and closed already.
                    connection.sendall(line[sent:])
                connection.settimeout(within)
                with connection.makefile("rb") as answers:
                    answer: Json = json.loads(answers.readline(_LONGEST_LINE))
                    size = int(answer.get("bytes", 0))
                    content = bytearray(size if take is None else min(size, _PIECE))
                    left, room = size, memoryview(content)
                    while left:
                        count = answers.readinto(room[:left])
                        if not count:
                            raise StorageAway("the agent has ended while it answered")
                        left -= count
                        if take is None:
                            room = room[count:]
                        else:
                            take(room[:count])
        except (OSError, ValueError) as error:
            raise StorageAway(f"the agent does not answer: {error}") from error
        if problem := answer.get("problem"):
            raise (StorageAway if answer.get("retry") else StorageProblem)(str(problem))
        return answer, content


def find_storage(environment: Mapping[str, str] = os.environ) -> StorageLink | None:
    """Returns the link of this process; None if Perdure did not start it, or its agent is of an older release."""
    run_directory = run_directory_of(environment)
    if run_directory is None or not (run_directory / CHECKPOINT_SOCKET).exists():
        return None
    return StorageLink(run_directory)


def open_in_memory(content: bytes) -> int:
    """Returns an open file with this content, which other processes can read."""
    descriptor = os.memfd_create("perdure-checkpoint", os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor
