"""A real HTTP server that receives notifications, and behaves as badly as a test asks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_CLOSES = web.AppKey("closes", asyncio.Event)
Behavior = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    content: bytes
    body: dict[str, Any]
    accepted: bool

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


@dataclass
class Receiver:
    """What arrived, by path; a path without a behavior accepts everything."""

    port: int = 0
    requests: list[Received] = field(default_factory=list[Received])
    behaviors: dict[str, list[Behavior]] = field(default_factory=dict[str, list[Behavior]])
    """By path, how the next requests are answered, one behavior for each; the last one stays."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def accepted(self, path: str) -> list[Received]:
        return [one for one in self.requests if one.path == path and one.accepted]

    async def until(self, condition: Callable[[], bool], *, within: float = 60) -> None:
        async with asyncio.timeout(within):
            while not condition():
                await self._changed.wait()
                self._changed.clear()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        behaviors = self.behaviors.get(request.path, [])
        behavior = behaviors.pop(0) if len(behaviors) > 1 else behaviors[0] if behaviors else None
        content = await request.read()
        answer: web.StreamResponse = web.Response()
        received = Received(request.path, dict(request.headers), content, await request.json(), behavior is None)
        self.requests.append(received)
        self._changed.set()
        if behavior is not None:
            answer = await behavior(request)
            received.accepted = answer.status < 300
            self._changed.set()
        return answer


def answers(status: int, **headers: str) -> Behavior:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return answer


async def hangs(request: web.Request) -> web.StreamResponse:
    await request.app[_CLOSES].wait()
    return web.Response(status=503)


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """A receiver while the context is open."""
    receiver = Receiver()
    app = web.Application()
    closes = app[_CLOSES] = asyncio.Event()
    app.router.add_post("/{path:.*}", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        closes.set()
        await runner.cleanup()


@contextmanager
def receiving_in_thread() -> Iterator[Receiver]:
    """A receiver for tests without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="receiver")
    thread.start()
    context = receiving()
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
