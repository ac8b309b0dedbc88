"""Looks at something for as long as a page shows it, once for all pages that show the same."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import Generic, TypeVar

from perdure.base.errors import PerdureError

logger = logging.getLogger(__name__)

LookT = TypeVar("LookT")

LINGER = 60.0
"""Seconds for which looking continues after the last page, for pages that are loaded again."""

_SHARE = 0.05
"""Looking takes this share of the time, at most."""
_LONGEST_PAUSE = 10.0
_BREATH = 0.1
"""The longest pause between two looks while there is news: a look that took long has mostly waited for answers."""


class Feed(Generic[LookT]):
    """Looks repeatedly, and hands each look to all followers.

    Args:
        look: Looks once.
        interval: The pause between two looks, by the last one.
        news: Yields when there is something new to look at, at once.
        on_idle: Is called when no page has followed for a while, or when the first look has failed, as at a job that
            does not exist; the feed is over then.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[LookT]],
        interval: Callable[[LookT], timedelta],
        on_idle: Callable[[], object],
        news: Callable[[], AsyncGenerator[None]] | None = None,
    ) -> None:
        self._look = look
        self._interval = interval
        self._on_idle = on_idle
        self._news = news
        self._first: asyncio.Task[LookT] | None = None
        self._last: LookT | None = None
        self._due = asyncio.Event()
        self._fresh = asyncio.Condition()
        self._number = 0
        self._followers = 0
        self._task: asyncio.Task[None] | None = None

    async def newest(self) -> LookT:
        """The last look while pages follow; else a new one, the same for all that ask meanwhile."""
        if self._last is None:
            self._first = self._first or asyncio.create_task(self._look_first())
            # One of those that wait may go away.
            first = await asyncio.shield(self._first)
            self._last = first if self._last is None else self._last
        self._begin()
        return self._last

    async def follow(self) -> AsyncGenerator[LookT]:
        """Yields the newest look, and each later one as far as the follower keeps up."""
        self._followers += 1
        try:
            look = await self.newest()
            while True:
                seen = self._number
                yield look
                async with self._fresh:
                    await self._fresh.wait_for(lambda seen=seen: self._number > seen)
                look = await self.newest()
        finally:
            self._followers -= 1

    def refresh(self) -> None:
        """Looks at once: something was changed from here."""
        self._due.set()

    async def close(self) -> None:
        """Ends looking."""
        tasks = [task for task in (self._first, self._task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_first(self) -> LookT:
        try:
            return await self._look()
        except BaseException:
            self._on_idle()
            raise

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        listening = asyncio.create_task(self._listen(self._news)) if self._news else None
        try:
            await self._look_until_idle()
            # At once: a page that is opened from now on is one of another feed.
            self._on_idle()
        finally:
            if listening:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, news: Callable[[], AsyncGenerator[None]]) -> None:
        """Looks at once when there is something new, until there will be nothing new."""
        while True:
            pause = LINGER
            try:
                async with aclosing(news()) as coming:
                    async for _ in coming:
                        self._due.set()
            except PerdureError:
                pause = _LONGEST_PAUSE  # Meanwhile it looks by its interval alone.
            await asyncio.sleep(pause)

    async def _look_until_idle(self) -> None:
        idle, took = 0.0, 0.0
        # A page may have been opened since the last pause began.
        while idle <= LINGER or self._followers:
            assert self._last is not None
            pause = max(self._interval(self._last).total_seconds(), min(took / _SHARE, _LONGEST_PAUSE))
            idle = 0.0 if self._followers else idle + pause
            with suppress(TimeoutError):
                # A burst of news is a few looks, and a quick one leaves half of the time to others.
                await asyncio.sleep(min(took, pause, _BREATH))
                # Python 3.11's `wait_for` may keep a cancellation to itself, which then ends nothing.
                async with asyncio.timeout(max(pause - min(took, _BREATH), 0.0)):
                    await self._due.wait()
            self._due.clear()
            began = time.monotonic()
            try:
                self._last = await self._look()
            except Exception:
                # A page must not stop for what one look has found.
                logger.exception("a look has failed")
            took = time.monotonic() - began
            async with self._fresh:
                self._number += 1
                self._fresh.notify_all()
