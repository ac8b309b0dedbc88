"""Sockets that listen: at all addresses of this machine, of both families, unless a host is named.

A cluster has IPv4, IPv6 or both, and a probe, a scraper or an agent calls whichever address it has been given. Each
family has a socket of its own, so that a caller over IPv4 is seen with its own address, and not with one of IPv6 that
contains it.
"""

from __future__ import annotations

import contextlib
import errno
import socket

_FAMILY_IS_MISSING = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_BACKLOG = 128


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Returns a listening socket for each address that a host has; they have the same port.

    Args:
        host: A name or an address of this machine; empty for all of its addresses.
        port: The port; 0 for one that is free.

    Raises:
        OSError: if the host has no address here, or the port is taken at one of them.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    missing: OSError | None = None
    with contextlib.ExitStack() as opened:
        listening: list[socket.socket] = []
        for family, kind, protocol, _, place in dict.fromkeys(found):
            try:
                one = opened.enter_context(socket.socket(family, kind, protocol))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((place[0], port, *place[2:]))
                one.listen(_BACKLOG)
            except OSError as error:
                # A machine without IPv6 still names `::`, and one without IPv4 `0.0.0.0`.
                if error.errno not in _FAMILY_IS_MISSING:
                    raise
                missing = error
                continue
            one.setblocking(False)
            port = one.getsockname()[1]
            listening.append(one)
        if not listening:
            raise missing or OSError(errno.EADDRNOTAVAIL, "it has no address on this machine")
        opened.pop_all()
    return listening
