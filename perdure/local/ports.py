"""The ports of the embedded default's Temporal server: chosen once, so that it returns to them after each restart."""

from __future__ import annotations

import errno
import random
import socket
import sys

import psutil

from perdure.base.errors import ControlPlaneUnreachable

FIRST_PORT = 7233
"""Temporal's own default, with the UI 1,000 above it, for the user's own state folder; the 999 ports after it are for
others.

These are never ephemeral ports of the operating system: while the server is away, a client that retries such a port on
loopback ends up connected to itself, and holds the port.
"""


def choose_ports(*, first: bool) -> tuple[int, int]:
    """Chooses the ports of a new server: Temporal's own default, if it may be the `first`, else any of the others.

    Clients of a server that is away continue to connect to its port. If all folders began with the same port, the
    worker and the agents of one would sooner or later connect to the server of another.

    Returns:
        The port of the server, and that of its UI.

    Raises:
        ControlPlaneUnreachable: if all are in use.
    """
    others = list(range(FIRST_PORT + 1, FIRST_PORT + 1000))
    random.shuffle(others)
    for port in (*([FIRST_PORT] if first else []), *others):
        if is_free(port) and is_free(port + 1000):
            return port, port + 1000
    raise ControlPlaneUnreachable(
        f"no free port for a Temporal server from {FIRST_PORT} to {FIRST_PORT + 999}",
        remedy="Set TEMPORAL_ADDRESS to a server that runs.",
    )


def choose_ui_backend() -> str:
    """Chooses an address for the UI that no web page can find: one of 16 million of the loopback network, and one of
    20,000 ports. Only Linux has all addresses of that network; elsewhere the port alone has to be found.
    """
    chosen = random.SystemRandom()
    host = ".".join(str(chosen.randint(1, 254)) for _ in range(3)) if sys.platform == "linux" else "0.0.1"
    # Below the ephemeral ports of the operating systems, which other programs take at any time.
    return f"http://127.{host}:{chosen.randint(10_000, 29_999)}"


def listens(process: psutil.Process, port: int) -> bool:
    """Returns whether this process, and not another one, listens on a port."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in connections)


def is_free(port: int) -> bool:
    """Returns whether a server could listen on a port of 127.0.0.1.

    Raises:
        OSError: if this machine has no such address, or no free descriptor.
    """
    with socket.socket() as probe:
        # Binds as the server itself does: connections of a server that was killed may still linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
