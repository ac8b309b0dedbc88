"""Tells the launcher in which collectives a rank is, so that a job can name the collective in which ranks wait, and the
rank that has not come to it.

A thread answers over a Unix socket, for torch's flight recorder can be read only inside the process. torch has a server
for that, but an error of its thread ends the whole process, and it starts nine threads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterable
from math import prod
from pathlib import Path

from perdure_training.node_api.bodies import RankCollective, RankCollectives
from perdure_training.node_api.codec import encode

from .flight_recorder import Collective, read_collectives

MOST_GROUPS = 8
"""Process groups in an answer: those of which the rank has called a collective last."""
_LONGEST_TEXT = 80
_BACKLOG = 4


def serve_collectives(path: Path) -> None:
    """Answers each connection to the socket with the rank's `RankCollectives`.

    Raises:
        OSError: if the socket cannot be made.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The path itself may be too long for a socket.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        own = f"/proc/self/fd/{folder}/{path.name}"
        # Of the same process, before it executed its program again.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
        listening.bind(own)
        # The script's umask may allow more. No one else connects before it listens.
        os.chmod(own, 0o600)
        listening.listen(_BACKLOG)
    finally:
        os.close(folder)
    # A process that the rank forks has no thread that would answer.
    os.register_at_fork(after_in_child=listening.close)
    threading.Thread(target=_serve, args=(listening,), name="perdure collectives", daemon=True).start()


def positions(collectives: Iterable[Collective]) -> RankCollectives:
    """Returns where the rank is in each of its process groups.

    Args:
        collectives: The collectives that it has called, the oldest first.
    """
    current: dict[tuple[str, str], Collective] = {}
    for collective in collectives:
        key = (collective.group, collective.backend)
        known = current.pop(key, None)
        # A device runs them in their order: what is before one that has ended was captured in a graph, or has ended.
        follows = known is None or known.ended or (collective.ended and collective.on_device)
        current[key] = collective if known is None or follows else known
    newest = list(reversed(current.values()))[:MOST_GROUPS]
    return RankCollectives(groups=tuple(map(_position, newest)))


def _position(collective: Collective) -> RankCollective:
    sizes = ", ".join("x".join(map(str, shape)) for shape in collective.sizes)
    return RankCollective(
        group=collective.group[:_LONGEST_TEXT],
        sequence=collective.sequence,
        name=collective.name[:_LONGEST_TEXT],
        sizes=sizes[:_LONGEST_TEXT],
        elements=sum(map(prod, collective.sizes)),
        ended=collective.ended,
    )


def _serve(listening: socket.socket) -> None:
    told = False
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            try:
                answer = encode(positions(read_collectives() or ()))
            except Exception as error:
                # A recorder of another release: the rank trains on.
                if not told:
                    _tell(f"{type(error).__name__}: {error}")
                told = True
                continue
            with contextlib.suppress(OSError):
                connection.sendall(answer)


def _tell(why: str) -> None:
    # Without `logging`, whose configuration belongs to the script.
    sys.stderr.write(f"perdure: rank {os.environ.get('RANK')} does not tell in which collectives it is: {why}\n")
