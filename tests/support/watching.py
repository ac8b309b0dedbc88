"""Runs a backend's watch in the background for a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from perdure.activities.nodes.backend import NodeBackend
from perdure.contract import NodeEvent, NodeEventKind, WatchRequest


class Watching:
    """A watch in the background, and what it has said."""

    def __init__(self, backend: NodeBackend, request: WatchRequest) -> None:
        self.events: list[NodeEvent] = []
        self.heard: list[float] = []
        """When each of them was."""
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(backend, request))
        self._task.add_done_callback(lambda _: self._news.set())

    async def _run(self, backend: NodeBackend, request: WatchRequest) -> None:
        async with aclosing(backend.watch(request)) as batches:
            async for batch in batches:
                news = [fact for fact in batch if isinstance(fact, NodeEvent)]
                self.events.extend(news)
                self.heard.extend(time.time() for _ in news)
                self._news.set()

    async def until(
        self, kind: NodeEventKind, *, rank: int = 0, incarnation: int = 1, saying: str = "", within: float = 60.0
    ) -> NodeEvent:
        """The first such event."""
        try:
            async with asyncio.timeout(within):
                while True:
                    self._news.clear()
                    for event in self.events:
                        ours = (event.kind, event.rank, event.incarnation) == (kind, rank, incarnation)
                        if ours and saying in event.reason:
                            return event
                    if self._task.done():
                        self._task.result()
                        raise AssertionError(f"the watch has ended without {kind} {saying!r}: {self.events}")
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"no {kind} {saying!r} within {within} s: {self.events}") from None

    def kinds(self, rank: int = 0) -> list[NodeEventKind]:
        return [event.kind for event in self.events if event.rank == rank]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def watching(backend: NodeBackend, request: WatchRequest) -> AsyncIterator[Watching]:
    watch = Watching(backend, request)
    try:
        yield watch
    finally:
        await watch.close()
