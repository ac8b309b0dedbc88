"""The queue of objects to reconcile: the object that is due for longest comes first, and the rate is limited.

With a thousand jobs, jobs at rest are reconciled less often; a job to which something has happened comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

_LEAD = 3600.0
"""Seconds by which an event precedes a mere deadline."""


class Workqueue:
    """Keys, with the time at which each is due, for several consumers in one event loop."""

    def __init__(self, *, per_second: float) -> None:
        self._pause = 1 / per_second
        self._due: dict[str, float] = {}
        self._taken: set[str] = set()
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
        """Takes the key that is due for longest, once one is; no other task gets it until it is given back."""
        async with self._turn:
            while True:
                self._news.clear()
                free = self._due.keys() - self._taken
                key = min(free, key=lambda one: self._due[one], default=None)
                wait = None if key is None else max(self._due[key], self._next_take) - self._now()
                if key is not None and wait is not None and wait <= 0:
                    del self._due[key]
                    self._taken.add(key)
                    self._next_take = self._now() + self._pause
                    return key
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._news.wait()

    def give_back(self, key: str) -> None:
        """Gives the key back, so that it may be taken again when it is due."""
        self._taken.discard(key)
        self._news.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
