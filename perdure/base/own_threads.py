"""Threads for work of which a user's choice decides how long it takes: a storage or a name server that never answers.

The threads of `asyncio.to_thread` are few, and what a process does for others waits for them, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Occupied(Exception):
    """As much work of one key is in progress as may be: another attempt may begin later."""


class OwnThreads:
    """Runs each piece of work in a thread of its own, and so many of one key at once at most.

    What is given up, since its caller was cancelled, counts until it ends. It keeps no process from exiting.
    """

    def __init__(self, name: str, *, most: int) -> None:
        """Creates the object.

        Args:
            name: The name of the threads.
            most: Pieces of work of one key in progress.
        """
        self._name = name
        self._most = most
        self._running = Counter[str]()
        self._waiting = defaultdict[str, set[asyncio.Future[None]]](set)

    async def run(self, key: str, work: Callable[[], _Result], *, patience: float = 0.0) -> _Result:
        """Returns the result of the work, or raises its error.

        Args:
            key: What it is for. All work of a key is begun by one event loop.
            work: The work.
            patience: The most seconds to wait until less of this key is in progress.

        Raises:
            Occupied: if too much of this key is in progress.
        """
        if self._running[key] >= self._most and not await self._has_room(key, patience):
            raise Occupied(f"{self._running[key]} earlier attempts have not ended")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_Result] = loop.create_future()

        def end(settle: Callable[[Any], None], outcome: Any) -> None:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            for turn in self._waiting.pop(key, ()):
                if not turn.done():
                    turn.set_result(None)
            if not ended.done():
                settle(outcome)

        def run() -> None:
            settle: Callable[[Any], None] = ended.set_result
            try:
                outcome: Any = work()
            except Exception as error:
                settle, outcome = ended.set_exception, error
            # The loop may have been closed meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end, settle, outcome)

        self._running[key] += 1
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return await ended

    async def _has_room(self, key: str, patience: float) -> bool:
        """Waits until less is in progress; returns whether it is."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._running[key] >= self._most:
                    turn: asyncio.Future[None] = loop.create_future()
                    self._waiting[key].add(turn)
                    try:
                        await turn
                    finally:
                        self._waiting[key].discard(turn)
                return True
        return False
