"""Threads for work of which a user's choice decides how long it takes: a storage or a name server that never answers.

The threads of `asyncio.to_thread` are few, and what a process does for others waits for them, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
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

    async def run(self, key: str, work: Callable[[], _Result]) -> _Result:
        """Returns the result of the work, or raises its error.

        Raises:
            Occupied: if too much of this key is in progress.
        """
        if self._running[key] >= self._most:
            raise Occupied(f"{self._running[key]} earlier attempts have not ended")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_Result] = loop.create_future()

        def end(settle: Callable[[Any], None], outcome: Any) -> None:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
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
