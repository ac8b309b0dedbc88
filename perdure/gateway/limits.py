"""Limits calls, so that a caller who floods the gateway, or the servers behind it, does not slow down the others.

An agent that stays below them never notices: it sends some ten messages a second at most, and polls with one call.
What an agent has used is counted after it has proven who it is: no other caller can use up its share.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from perdure.gateway.lru_cache import LruCache


@dataclass(frozen=True)
class Limit:
    """How many calls one caller may make."""

    per_second: float
    burst: float
    """Calls at once, after a pause."""
    at_once: int
    """Calls in progress."""


AGENT: Final = Limit(per_second=50.0, burst=200.0, at_once=32)
"""The limit of one agent. After an outage it sends what it has kept; its signals may wait for a busy server."""
STRANGERS: Final = Limit(per_second=200.0, burst=2000.0, at_once=500)
"""The limit of one address for tokens without a review: each costs the API server a request. All agents of a cluster
may share an address, and connect again at the same time."""
NEWCOMERS: Final = Limit(per_second=20.0, burst=500.0, at_once=200)
"""The limit of one address for tickets that have not been verified: each may cost a job a query. All machines of a
site may share an address, and join at the same time."""
MACHINES: Final = Limit(per_second=10.0, burst=50.0, at_once=8)
"""The limit of one machine, as its ticket distinguishes machines: each call is an update of the job."""
JOIN_BYTES: Final = 64 * 1024
"""The largest request of a machine that joins; it holds the command."""
MESSAGE_BYTES: Final = 1024 * 1024
"""The largest message from an agent. Its largest are pieces of a log, of 256 KiB."""

_BYTES_OF_A_CALL: Final = 16 * 1024
"""A message counts as so many calls as it has pieces of this size: the gateway reads and writes its JSON, which takes
up to a fifth of a second for the largest one."""

_REFUSAL_SECONDS: Final = 0.5
"""The least time until a refusal is answered: a caller who repeats refused calls waits, and costs next to
nothing meanwhile."""
_REFUSALS_AT_ONCE: Final = 50
"""Refusals that one address may await before each of them takes longer: it gets at most this number in the time above,
however many connections it opens."""
_LONGEST_REFUSAL_SECONDS: Final = 20.0

_REMEMBERED: Final = 20_000


def network_of(address: str) -> str:
    """Returns what the limits of an address count: an address of IPv4, or the network of one of IPv6, in which a
    machine may have any number of others."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv4Address):
        return address
    return str(found.ipv4_mapped or f"{IPv6Address(int(found) >> 64 << 64)}/64")


class TooMany(Exception):
    """The caller is over its limit."""


@dataclass(frozen=True, kw_only=True)
class BodyLimit:
    """How many bodies of calls are received at once from callers who have proven nothing yet. Each of up to
    `MESSAGE_BYTES` is in memory as a whole; those that wait for their turn are not, but for a few kilobytes."""

    per_address: int
    total: int
    within: float
    """Seconds until a body must have been received; that of a machine takes milliseconds."""
    yields: float = 1.0
    """Seconds that it has while another caller waits for its place."""


STRANGERS_BODIES: Final = BodyLimit(per_address=8, total=64, within=10.0)


class Bodies:
    """Receives the bodies of calls that have to be read before it is known who the caller is."""

    def __init__(self, limit: BodyLimit = STRANGERS_BODIES) -> None:
        """Creates the object.

        Args:
            limit: Of what is received at once.
        """
        self._limit = limit
        self._all = asyncio.Semaphore(limit.total)
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._callers = Counter[str]()
        self._receiving: dict[asyncio.Timeout, float] = {}
        """The deadlines of bodies that are received and need not yield yet, with when each began, the oldest first."""

    async def receive(self, read: Callable[[], Awaitable[bytes]], *, address: str) -> bytes:
        """Returns the body of a call.

        Args:
            read: Receives it.
            address: Where the caller connects from.

        Raises:
            TooMany: if it is not received in time, as while others of the address send theirs.
        """
        turn = self._turns.setdefault(address, asyncio.Semaphore(self._limit.per_address))
        self._callers[address] += 1
        try:
            async with asyncio.timeout(self._limit.within) as deadline, turn:
                if self._all.locked():
                    self._hurry()
                async with self._all:
                    self._receiving[deadline] = asyncio.get_running_loop().time()
                    try:
                        return await read()
                    finally:
                        self._receiving.pop(deadline, None)
        except TimeoutError:
            raise TooMany(f"the request was not received within {self._limit.within:g} s, or others waited") from None
        finally:
            self._callers[address] -= 1
            if not self._callers[address]:
                del self._callers[address], self._turns[address]

    def _hurry(self) -> None:
        """Has the body that has taken longest be received soon: a few addresses could keep all others out with slow
        ones."""
        if not self._receiving:
            return
        deadline = next(iter(self._receiving))
        began = self._receiving.pop(deadline)
        if not deadline.expired():
            now = asyncio.get_running_loop().time()
            deadline.reschedule(min(deadline.when() or math.inf, max(now, began + self._limit.yields)))


class _Share:
    """What one caller has used."""

    def __init__(self, burst: float, now: float) -> None:
        self.left = burst
        self.counted_at = now
        self.in_progress = 0


class Refusals:
    """Delays the answers to refused calls. A refused caller is often not authenticated, so addresses are counted."""

    def __init__(self) -> None:
        self._waiting = Counter[str]()

    async def wait(self, address: str) -> None:
        """Returns when a refusal may be answered."""
        self._waiting[address] += 1
        try:
            await asyncio.sleep(refusal_seconds(self._waiting[address]))
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]


def refusal_seconds(waiting: int) -> float:
    """Returns the seconds that a refusal takes while `waiting` others of its address wait."""
    return min(_REFUSAL_SECONDS * (1 + waiting / _REFUSALS_AT_ONCE), _LONGEST_REFUSAL_SECONDS)


class Limits:
    """Counts the calls of each caller."""

    def __init__(self, limit: Limit, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates the counts.

        Args:
            limit: Of each caller.
            clock: Returns seconds.
        """
        self._limit = limit
        self._clock = clock
        self._shares = LruCache[str, _Share](_REMEMBERED)

    @contextmanager
    def one_call(self, caller: str) -> Generator[None]:
        """Counts a call for as long as the context is open.

        Raises:
            TooMany: if it has too many calls, or too many at once.
        """
        now, limit = self._clock(), self._limit
        share = self._shares.get(caller)
        if share is None:
            share = _Share(limit.burst, now)
            self._shares.put(caller, share)
        share.left = min(limit.burst, share.left + (now - share.counted_at) * limit.per_second)
        share.counted_at = now
        if share.left < 1:
            raise TooMany(f"more than {limit.per_second:g} calls a second")
        if share.in_progress >= limit.at_once:
            raise TooMany(f"more than {limit.at_once} calls at once")
        share.left -= 1
        share.in_progress += 1
        try:
            yield
        finally:
            share.in_progress -= 1

    def count_bytes(self, caller: str, size: int) -> None:
        """Counts the content of a call that is in progress.

        Raises:
            TooMany: if the caller sends too much.
        """
        share, calls = self._shares.get(caller), size / _BYTES_OF_A_CALL
        if share is None:
            return
        if share.left < calls:
            raise TooMany(f"more than {self._limit.per_second * _BYTES_OF_A_CALL:,.0f} bytes a second")
        share.left -= calls
