"""Bounds connections to the gateway, so that callers who prove nothing cannot take its memory by holding many open.

gRPC accepts connections and knows no bound for each address, and a bound for all would let a stranger keep agents out.
So the process looks at its own connections every few seconds, and closes those that are too many or have not proven in
time who holds them. An agent whose connection is closed connects again; it has lost no call that it would not repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from perdure.gateway.limits import network_of
from perdure.gateway.metrics import GatewayMetrics, Reason

logger = logging.getLogger("perdure.gateway")

_FOLDER: Final = "/dev/fd"
"""Has an entry for each open file of this process."""


@dataclass(frozen=True, kw_only=True)
class ConnectionBounds:
    """How many connections are kept open."""

    within: float
    """Seconds from the start of a connection to the first call whose caller has proven who it is."""
    per_address: int
    """Connections of one address that have not proven anything yet. All agents of a cluster may share one, and connect
    again at the same time."""
    total: int
    """Connections that have not proven anything yet; each takes about 47 KB."""
    per_caller: int
    """Connections of one agent or machine; it uses a few."""


BOUNDS: Final = ConnectionBounds(within=20.0, per_address=1000, total=4000, per_caller=64)
INTERVAL: Final = 2.0
"""Seconds between two looks, each of which takes some microseconds for each open file."""


@dataclass(frozen=True)
class Opened:
    """One connection."""

    peer: str
    """As gRPC names it, such as `ipv4:10.0.0.1:50000`."""
    since: float
    """When it was seen first, in seconds of a monotonic clock."""
    caller: str = ""
    """Who has proven to hold it; empty if no caller has."""


def superfluous(opened: Collection[Opened], bounds: ConnectionBounds, *, now: float) -> list[Opened]:
    """The connections to close: those without proof that are too old, and the oldest of those that are too many."""
    found: dict[str, Opened] = {}
    strangers = sorted((one for one in opened if not one.caller), key=lambda one: one.since)
    found |= {one.peer: one for one in strangers if now - one.since > bounds.within}
    strangers = [one for one in strangers if one.peer not in found]
    groups: dict[tuple[str, str], list[Opened]] = defaultdict(list)
    for one in strangers:
        groups["address", host_of(one.peer)].append(one)
    for one in sorted((one for one in opened if one.caller), key=lambda one: one.since):
        groups["caller", one.caller].append(one)
    for (kind, _), group in groups.items():
        most = bounds.per_address if kind == "address" else bounds.per_caller
        found |= {one.peer: one for one in group[: max(len(group) - most, 0)]}
    left = [one for one in strangers if one.peer not in found]
    found |= {one.peer: one for one in left[: max(len(left) - bounds.total, 0)]}
    return list(found.values())


class Connections:
    """The connections to one port of this process."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        bounds: ConnectionBounds = BOUNDS,
        *,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the object.

        Args:
            metrics: Counts those that are closed, as refusals.
            bounds: How many are kept open.
            interval: Seconds between two looks.
            clock: Returns seconds.
        """
        self._metrics = metrics
        self._bounds = bounds
        self._interval = interval
        self._clock = clock
        self._callers: dict[str, str] = {}
        """Who has proven to hold a connection, by its peer."""
        self._since: dict[str, float] = {}

    def prove(self, peer: str, caller: str) -> None:
        """Records that the caller of a call has proven who it is.

        Args:
            peer: Of the call, as gRPC names it.
            caller: The same text for all calls of one agent or machine.
        """
        self._callers[peer] = caller

    async def keep_bounded(self, port: int) -> None:
        """Closes connections to a port as the bounds ask for it, until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.close_superfluous(port)
            except OSError as error:
                # The next look may succeed; until then gRPC's own limits hold.
                logger.warning("connections cannot be counted: %s", error)

    async def close_superfluous(self, port: int) -> int:
        """Looks once; returns how many connections were closed."""
        known = set(self._callers)
        found = await asyncio.to_thread(lambda: dict(_peers(port)))
        now = self._clock()
        self._since = {peer: self._since.get(peer, now) for peer in found}
        for gone in known - found.keys():
            self._callers.pop(gone, None)
        opened = [Opened(peer, since, self._callers.get(peer, "")) for peer, since in self._since.items()]
        closing = superfluous(opened, self._bounds, now=now)
        closed = await asyncio.to_thread(_close, {one.peer: found[one.peer] for one in closing})
        for _ in range(closed):
            self._metrics.count_refusal(Reason.CONNECTION)
        if closed:
            hosts = sorted({host_of(one.peer) for one in closing})
            more = f" and {len(hosts) - 5} others" if len(hosts) > 5 else ""
            logger.warning(
                "closed %d connections without proof, or too many of one caller, from %s%s",
                *(closed, ", ".join(hosts[:5]), more),
            )
        return closed


def host_of(peer: str) -> str:
    """Returns the address without the port, such as `ipv4:10.0.0.1`; of IPv6 its network, `ipv6:2001:db8::/64`."""
    kind, _, address = peer.rpartition(":")[0].partition(":")
    return f"{kind}:{network_of(unquote(address).strip('[]'))}"


def _peers(port: int) -> Iterator[tuple[str, int]]:
    """Yields the peer and the descriptor of each connection to a port of this process."""
    for name in os.listdir(_FOLDER):
        if (peer := _peer_of(int(name), port)) is not None:
            yield peer, int(name)


def _peer_of(descriptor: int, port: int) -> str | None:
    """The peer of a connection to a port of this process; None if the descriptor is anything else."""
    try:
        # With its family given, nothing is asked of the descriptor yet: most are no sockets.
        found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        own, other = found.getsockname(), found.getpeername()
    except OSError:
        return None
    finally:
        # It belongs to gRPC, or to whatever opened it.
        found.detach()
    if not isinstance(own, tuple) or own[1] != port:
        return None
    host = str(other[0])
    mapped = host.removeprefix("::ffff:")
    if ":" not in mapped:
        return f"ipv4:{mapped}:{other[1]}"
    return f"ipv6:%5B{host}%5D:{other[1]}"


def _close(descriptors: Mapping[str, int]) -> int:
    """Ends connections, each given by its peer and its descriptor, which may belong to another one by now."""
    closed = 0
    for peer, descriptor in descriptors.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
            if _peer_of(own.fileno(), int(own.getsockname()[1])) == peer:
                # gRPC sees the end of it, and closes its own descriptor.
                own.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed
