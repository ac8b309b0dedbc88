"""Ports for servers of tests that two processes never choose at once.

A port of the ephemeral range may be given to any connection of the machine between the choice and the server's start.
Each test process therefore holds a block of ports below that range, by a socket on the block's first: whoever runs the
others, and whatever folders they use.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import cache

from tests.support import descriptors

_FIRST, _LAST, _BLOCK = 11_000, 29_999, 500
"""Above the ports of a cluster's components, below the node ports and ephemeral ports of Linux and macOS."""


def free_port() -> int:
    """Returns a port that nothing listens on, and that this process does not return again soon.

    Raises:
        OSError: if all ports of the block are in use.
    """
    ports = _ports(os.getpid())
    for _ in range(_BLOCK):
        port = next(ports)
        if _is_free(port):
            return port
    raise OSError("all ports of this process are in use")


def free_ports(count: int) -> range:
    """Returns ports in a row, each as by `free_port`.

    Raises:
        OSError: if the block has no such row.
    """
    first = last = free_port()
    for _ in range(_BLOCK):
        if last - first + 1 == count:
            return range(first, last + 1)
        port = free_port()
        first, last = first if port == last + 1 else port, port
    raise OSError(f"no {count} ports in a row are free")


@cache
def _ports(process: int) -> Iterator[int]:
    """Yields the ports of the block, over and over; a forked process has a block of its own."""
    for first in range(_FIRST, _LAST, _BLOCK):
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", first))
        except OSError:
            held.close()
        else:
            # Open for as long as the process lives.
            descriptors.keep(held.detach())
            return _cycle(range(first + 1, first + _BLOCK))
    raise OSError(f"all blocks of ports from {_FIRST} on are taken by running tests")


def _cycle(ports: range) -> Iterator[int]:
    while True:
        yield from ports


def _is_free(port: int) -> bool:
    for address in ("0.0.0.0", "127.0.0.1"):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
