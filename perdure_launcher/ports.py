"""Ports that this node already holds, so that a world can name one before anybody enters it.

Each generation takes a port that no generation has used: no rank ever meets the keys of a dead attempt. Where we host
the store, the port listens from the start, and a rank that connects early waits in the backlog instead of failing.
"""

from __future__ import annotations

import errno
import logging
import socket

logger = logging.getLogger(__name__)

POOL_SIZE = 8
_BACKLOG = 4096
"""All ranks of the world may connect before the store answers; the kernel caps it at net.core.somaxconn."""


class PortPool:
    """A pool of bound sockets."""

    def __init__(self, address: str, *, listening: bool, size: int = POOL_SIZE) -> None:
        """Opens the pool.

        Args:
            address: Where others reach this node. Listened on alone where it is one of ours, else on all addresses
                (behind address translation it is nobody's).
            listening: Whether the sockets listen; else they only keep others from taking the ports.
            size: How many ports to hold.
        """
        self._size = size
        self._listening = listening
        self._family, self._address = _local_address(address)
        self._sockets: dict[int, socket.socket] = {}
        self.replenish()

    @property
    def host(self) -> str:
        """Where this process reaches its own ports."""
        if self._address not in ("", "::"):
            return self._address
        return "::1" if self._family == socket.AF_INET6 else "127.0.0.1"

    @property
    def numbers(self) -> list[int]:
        return list(self._sockets)

    def replenish(self) -> None:
        """Takes new ports in the place of those that were handed out."""
        while len(self._sockets) < self._size:
            try:
                opened = self._bind(0)
            except OSError as error:
                logger.error("no further port can be opened for the world's store: %s", error)
                return
            self._sockets[opened.getsockname()[1]] = opened

    def take(self, port: int) -> socket.socket:
        """Hands out the socket of a port; one that is not of the pool is opened now.

        Raises:
            OSError: if the port belongs to somebody else.
        """
        return self._sockets.pop(port, None) or self._bind(port)

    def close(self) -> None:
        for opened in self._sockets.values():
            opened.close()
        self._sockets.clear()

    def _bind(self, port: int) -> socket.socket:
        opened = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((self._address, port))
            if self._listening:
                opened.listen(_BACKLOG)
        except OSError:
            opened.close()
            raise
        return opened


def _local_address(address: str) -> tuple[socket.AddressFamily, str]:
    try:
        candidates = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        candidates = []
    for family, _, _, _, place in candidates:
        host = str(place[0])
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                logger.warning("%s cannot be listened on: %s", host, error)
            continue
        return family, host
    return socket.AF_INET, ""
