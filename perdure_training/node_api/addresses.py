"""Addresses as text: a host and a port in the form that URLs have, with brackets around an address of IPv6."""

from __future__ import annotations


def host_and_port(host: str, port: int | str) -> str:
    """Returns both as one text, such as `10.0.0.1:7433` or `[fd00::1]:7433`."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of such a text. The host has no brackets; it is empty where the text names only a port.

    Raises:
        ValueError: if the text does not end in a port.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
