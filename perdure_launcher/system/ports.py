"""Ports that this node already holds, so that a world can name one before any node enters it.

Each generation takes a port that no generation has used, so no rank ever finds the keys of a dead attempt. On the node
that hosts the store, the port listens from the start, and a rank that connects early waits in the backlog instead of
failing. If a firewall leaves only some ports open (`network.store_ports`), they are taken in turn: each is used again
only after all the others.
"""

from __future__ import annotations

import errno
import itertools
import logging
import socket
from collections.abc import Iterator

logger = logging.getLogger(__name__)

POOL_SIZE = 8
_ANY = 0
_SHARE = 4
"""A pool holds at most this fraction (one in so many) of the allowed ports, because nodes may share a machine."""
_APART = 4
"""The distance between two ports of a pool, but where it comes to the end of those that are allowed."""
_BACKLOG = 4096
"""All ranks of the world may connect before the store answers; the kernel caps it at net.core.somaxconn."""


class PortPool:
    """A pool of bound sockets."""

    def __init__(
        self, address: str, *, listening: bool, allowed: range | None = None, start: int = 0, size: int = POOL_SIZE
    ) -> None:
        """Opens the pool.

        Args:
            address: The address at which others reach this node. The pool listens on it if it is this machine's own,
                else on all addresses (behind address translation no interface has it).
            listening: Whether the sockets listen; otherwise they only reserve the ports.
            allowed: The ports to choose from; None for any free port.
            start: The index in `allowed` to begin with, modulo its length: a pool that follows another one should not
                begin with the ports that the other one has used.
            size: The number of ports to hold.
        """
        self._allowed = allowed
        self._size = size if allowed is None else min(size, max(1, len(allowed) // _SHARE))
        self._listening = listening
        self._family, self._address = _local_address(address)
        self._sockets: dict[int, socket.socket] = {}
        self._next = _in_turn(allowed, start)
        self._failure: OSError | None = None
        self._of_scripts = range(0)
        """Ports that are left to the ranks' own stores."""
        self.replenish()

    @property
    def host(self) -> str:
        """The address at which this process reaches its own ports."""
        if self._address not in ("", "::"):
            return self._address
        return "::1" if self._family == socket.AF_INET6 else "127.0.0.1"

    @property
    def numbers(self) -> list[int]:
        return list(self._sockets)

    @property
    def problem(self) -> str:
        """Why there is no port left, and what to change; empty if there is one."""
        if self._sockets:
            return ""
        detail = f" ({self._failure.strerror or self._failure})" if self._failure else ""
        if self._allowed is None:
            return f"no port can be opened for the world's store{detail}"
        return (
            f"none of the ports {self._allowed.start}-{self._allowed.stop - 1} is free for the world's store{detail}; "
            "let network.store_ports name more of them, or ports that nothing else on this machine takes"
        )

    def keep_clear_of(self, port: int) -> None:
        """Leaves the numbers right after a world's port to its ranks, whose scripts have stores of their own there."""
        self._of_scripts = range(port + 1, port + _APART)
        for number in [number for number in self._sockets if number in self._of_scripts]:
            self._sockets.pop(number).close()

    def replenish(self) -> None:
        """Opens new ports for those that were handed out, as far as any are free."""
        self._open(without=self._of_scripts)
        if not self._sockets:
            self._open(without=range(0))
        if problem := self.problem:
            logger.error("%s", problem)

    def _open(self, *, without: range) -> None:
        for _ in range(2 * self._size if self._allowed is None else len(self._allowed)):
            if len(self._sockets) >= self._size:
                return
            port = next(self._next)
            if port in self._sockets or port in without:
                continue
            try:
                opened = self._bind(port)
            except OSError as error:
                self._failure = error
                continue
            if (number := opened.getsockname()[1]) in without:
                opened.close()
            else:
                self._sockets[number] = opened

    def take(self, port: int) -> socket.socket:
        """Hands out the socket of a port; opens it now if it is not in the pool.

        Raises:
            OSError: if the port belongs to another process.
        """
        return self._sockets.pop(port, None) or self._bind(port)

    def close(self) -> None:
        for opened in self._sockets.values():
            opened.close()
        self._sockets.clear()

    def _bind(self, port: int) -> socket.socket:
        opened = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            if self._listening:
                # Not for sockets that do not listen: with this option two of them could bind the same port.
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._address == "::":
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            opened.bind((self._address, port))
            if self._listening:
                opened.listen(_BACKLOG)
        except OSError:
            opened.close()
            raise
        return opened


def parse_ports(text: str) -> range:
    """Reads a range such as `29500-29599`, both ends included.

    Raises:
        ValueError: if the text is not a range of ports.
    """
    first, _, last = text.partition("-")
    ports = range(int(first), int(last) + 1)
    if not ports or ports.start < 1 or ports.stop > 65536:
        raise ValueError(text)
    return ports


def _in_turn(allowed: range | None, start: int) -> Iterator[int]:
    if allowed is None:
        return itertools.repeat(_ANY)
    # Scripts use the numbers right after MASTER_PORT for stores of their own, so the pool does not hold these.
    turn = [port for offset in range(_APART) for port in allowed[offset::_APART]]
    start %= len(turn)
    return itertools.cycle([*turn[start:], *turn[:start]])


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
                logger.warning("cannot listen on %s: %s", host, error)
            continue
        return family, host
    if any(family == socket.AF_INET6 for family, *_ in candidates):
        return socket.AF_INET6, "::"
    return socket.AF_INET, ""
