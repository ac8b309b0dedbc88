"""Which object is looked at next: the one that is due for longest, so many a second and no more.

With a thousand jobs the ones at rest are looked at less often; one to which something has happened comes before them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

_LEAD = 3600.0
"""Seconds that what has happened is ahead of what is merely due."""


class Workqueue:
    """Keys and the time at which each is due, for several takers of one event loop."""

    def __init__(self, *, per_second: float) -> None:
        self._pause = 1 / per_second
        self._due: dict[str, float] = {}
        self._taken: set[str] = set()
        self._next_take = 0.0
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()

    def plan(self, key: str, *, after: float | None = None) -> None:
        """Has the key taken, unless it is planned for earlier; a taken one once it is back.

        Args:
            key: Something has happened to it.
            after: Or nothing has, and it is due so many seconds from now.
        """
        due = self._now() + (-_LEAD if after is None else after)
        self._due[key] = min(due, self._due.get(key, due))
        self._news.set()

    def forget(self, key: str) -> None:
        """There is nothing to look at any more."""
        self._due.pop(key, None)

    async def take(self) -> str:
        """The key that is due for longest, once one is; no other task gets it until it is given back."""
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
        """It may be taken again when it is due."""
        self._taken.discard(key)
        self._news.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
