"""The queue of objects to reconcile: the object that is due for longest comes first, and the rate is limited.

With a thousand jobs, jobs at rest are reconciled less often; a job to which something has happened comes first. Tenants
take turns: one with thousands of objects, or with objects that each take seconds, delays those of the others by no more
than a turn.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

_LEAD = 3600.0
"""Seconds by which an event precedes a mere deadline."""
_TENANTS = 10_000
"""Tenants whose last turn is known; one that is not known comes first."""


class Workqueue:
    """Keys, with the time at which each is due, for several consumers in one event loop."""

    def __init__(self, *, per_second: float, tenant_of: Callable[[str], str], at_once: int) -> None:
        """Creates an empty queue.

        Args:
            per_second: The limit of keys that are taken.
            tenant_of: Returns the tenant of a key.
            at_once: The limit of keys of one tenant that are in use.
        """
        self._pause = 1 / per_second
        self._tenant_of = tenant_of
        self._at_once = at_once
        self._served_at: dict[str, float] = {}
        """When a key of each tenant was taken last."""
        self._due: dict[str, float] = {}
        self._taken: dict[str, str] = {}
        """The tenants of the keys in use."""
        self._next_take = 0.0
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()

    def plan(self, key: str, *, after: float | None = None) -> None:
        """Schedules the key, unless it is scheduled for earlier; a key in use is scheduled once it is given back.

        Args:
            key: The key.
            after: Seconds until it is due; None if something has happened to it.
        """
        due = self._now() + (-_LEAD if after is None else after)
        self._due[key] = min(due, self._due.get(key, due))
        self._news.set()

    def forget(self, key: str) -> None:
        """Removes the key."""
        self._due.pop(key, None)

    async def serve(self, handle: Callable[[str], Awaitable[None]]) -> NoReturn:
        """Handles each key once it is due, one after the other, until it is cancelled or handling one fails."""
        while True:
            key = await self.take()
            try:
                await handle(key)
            finally:
                self.give_back(key)

    async def take(self) -> str:
        """Takes the key that is due for longest, of the tenant whose turn it is, once one is due; no other task gets it
        until it is given back."""
        async with self._turn:
            while True:
                self._news.clear()
                now = self._now()
                busy = Counter(self._taken.values())
                free = {
                    key: tenant
                    for key in self._due.keys() - self._taken.keys()
                    if busy[tenant := self._tenant_of(key)] < self._at_once
                }
                due = [key for key in free if self._due[key] <= now]
                if due and now >= self._next_take:
                    key = min(due, key=lambda key: (not self._has_happened(key, now), *self._rank(key, free[key])))
                    self._note_take(key, free[key], now)
                    return key
                first = min((self._due[key] for key in free), default=None)
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if first is None else max(first, self._next_take) - now):
                        await self._news.wait()

    def _rank(self, key: str, tenant: str) -> tuple[float, float]:
        return self._served_at.get(tenant, -math.inf), self._due[key]

    def _has_happened(self, key: str, now: float) -> bool:
        """Whether something has happened to it; the time alone makes no key due so early."""
        return self._due[key] <= now - _LEAD / 2

    def _note_take(self, key: str, tenant: str, now: float) -> None:
        del self._due[key]
        self._taken[key] = tenant
        self._served_at.pop(tenant, None)
        self._served_at[tenant] = now
        if len(self._served_at) > _TENANTS:
            del self._served_at[next(iter(self._served_at))]
        self._next_take = now + self._pause

    def give_back(self, key: str) -> None:
        """Gives the key back, so that it may be taken again when it is due."""
        self._taken.pop(key, None)
        self._news.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
