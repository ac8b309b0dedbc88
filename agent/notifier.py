"""Waiting for a change of state that plain functions make: a condition whose notification needs no lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Notifier:
    """Wakes the tasks that wait. For one event loop; conditions are checked without a pause in between, so none is
    missed."""

    def __init__(self) -> None:
        self._beat = asyncio.Event()

    def fire(self) -> None:
        """Wakes all who wait, to look again."""
        self._beat.set()
        self._beat = asyncio.Event()

    async def wait_for(self, condition: Callable[[], bool], *, within: float | None = None) -> bool:
        """Returns when the condition holds, or after `within` seconds; says whether it holds."""
        try:
            async with asyncio.timeout(within):
                while not condition():
                    await self._beat.wait()
        except TimeoutError:
            return condition()
        return True
