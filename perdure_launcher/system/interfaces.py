"""Finds the network interface that has an address: gloo needs its name on machines with several interfaces.

By default gloo listens on the address that the machine's hostname resolves to. That is often on another interface than
the one through which the nodes reach each other or, as on Debian, the loopback interface.
"""

from __future__ import annotations

import ctypes
import os
import socket

_PLACES: dict[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""The bytes of C's socket address that hold the address itself, by family."""


class _Address(ctypes.Structure):
    """The beginning of C's `struct ifaddrs`; later fields are not read."""


_Address._fields_ = (
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
)

_libc = ctypes.CDLL(None, use_errno=True)


def interface_of(address: str) -> str | None:
    """Returns the interface of this machine that has an address or, for a name, the first of its addresses.

    Returns None if there is none, because of address translation, say.
    """
    try:
        known = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        interfaces = _interfaces()
    except OSError:
        return None
    addresses = {str(place[0]).partition("%")[0] for *_, place in known}
    return next((name for name, own in interfaces if own in addresses), None)


def _interfaces() -> list[tuple[str, str]]:
    """Returns pairs of an interface and one of its addresses.

    Raises:
        OSError: if the kernel does not report them.
    """
    first = ctypes.POINTER(_Address)()
    if _libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: list[tuple[str, str]] = []
    try:
        current = first
        while current:
            entry = current.contents
            family = ctypes.c_ushort.from_address(entry.address).value if entry.address else 0
            if place := _PLACES.get(family):
                packed = ctypes.string_at(entry.address, place.stop)[place]
                found.append((os.fsdecode(entry.name), socket.inet_ntop(family, packed)))
            current = entry.next
    finally:
        _libc.freeifaddrs(first)
    return found
