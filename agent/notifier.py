"""Waits for state changes that plain functions make: a condition variable without a lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Notifier:
    """Wakes waiting tasks of one event loop. Tasks check their conditions without yielding in between, so no change is
    missed."""

    def __init__(self) -> None:
        self._beat = asyncio.Event()

    def fire(self) -> None:
        """Wakes all waiting tasks, which check their conditions again."""
        self._beat.set()
        self._beat = asyncio.Event()

    async def wait_for(self, condition: Callable[[], bool], *, within: float | None = None) -> bool:
        """Waits until the condition holds, or for `within` seconds; returns whether it holds."""
        try:
            async with asyncio.timeout(within):
                while not condition():
                    await self._beat.wait()
        except TimeoutError:
            return condition()
        return True
