"""A scripted agent for one launcher: a real HTTP server on a real Unix socket that implements docs/node-protocol.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic_core import from_json

from tests.support.waiting import DEADLINE


@dataclass(frozen=True)
class Post:
    """One thing that the node's processes said."""

    path: str
    body: dict[str, Any]
    heard_at: float


class AgentDouble:
    """Keeps what it is told, and answers long polls; can be stopped and started again, with or without its memory."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.posts: list[Post] = []
        self.version = 1
        self.desired: dict[str, Any] = {
            "run": True,
            "attempt": 1,
            "stop_generation": 0,
            "exit": False,
            "reason": "",
        }
        self.world: dict[str, Any] | None = None
        self.complete = 0
        self.stages_complete = 0

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/{tail:.*}", self._post)])
        app.add_routes([web.get("/v1/launcher/desired", self._get_desired)])
        app.add_routes([web.get("/v1/rendezvous/world", self._get_world)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._socket.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self._socket)).start()

    async def stop(self) -> None:
        if self._runner:
            runner, self._runner = self._runner, None
            async with self._changed:
                self._changed.notify_all()
            await runner.cleanup()
        self._socket.unlink(missing_ok=True)

    async def want(self, **changes: Any) -> None:
        """Changes what the launcher must make true."""
        async with self._changed:
            self.desired.update(changes)
            self.version += 1
            self._changed.notify_all()

    async def apply(self, world: dict[str, Any]) -> None:
        """Hands out a world, as an agent does whose group desires it."""
        async with self._changed:
            self.world = world
            self.desired["stop_generation"] = world["generation"] - 1
            self.version += 1
            self._changed.notify_all()

    async def complete_generation(self, generation: int, *, stages: int = 0) -> None:
        async with self._changed:
            self.complete, self.stages_complete = generation, stages
            self._changed.notify_all()

    async def heard(
        self, path: str, where: Callable[[dict[str, Any]], bool] = lambda _: True, *, within: float = DEADLINE
    ) -> Post:
        """Waits for the first post to this path that fits; it is then taken out of `posts`."""

        def first() -> Post | None:
            return next((post for post in self.posts if post.path == path and where(post.body)), None)

        try:
            async with asyncio.timeout(within), self._changed:
                await self._changed.wait_for(lambda: first() is not None)
        except TimeoutError:
            said = [(post.path, post.body) for post in self.posts]
            raise AssertionError(f"nothing fitting was said to {path} within {within} s; said: {said}") from None
        post = first()
        assert post is not None
        self.posts.remove(post)
        return post

    def said(self, path: str) -> list[dict[str, Any]]:
        return [post.body for post in self.posts if post.path == path]

    async def _post(self, request: web.Request) -> web.Response:
        try:
            # As strict as the agent's own parser, which takes no lone surrogates.
            body = from_json(await request.read(), allow_inf_nan=False)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        async with self._changed:
            self.posts.append(Post(request.path, body, time.time()))
            self._changed.notify_all()
        return web.json_response({})

    async def _get_desired(self, request: web.Request) -> web.Response:
        version = int(request.query["version"])
        await self._wait(request, lambda: self.version != version)
        return web.json_response({**self.desired, "version": self.version, "world": self._answer_world()})

    async def _get_world(self, request: web.Request) -> web.Response:
        after, complete, stage, stages = (int(request.query[name]) for name in ("after", "complete", "stage", "stages"))

        def answer() -> dict[str, Any]:
            world = self.world if self.world and self.world.get("stage", stage) == stage else None
            return {"world": world, "complete": self.complete, "stages_complete": self.stages_complete}

        def is_news() -> bool:
            world = answer()["world"]
            newer = world is not None and world["generation"] > after
            return newer or self.complete > complete or self.stages_complete > stages

        await self._wait(request, is_news)
        return web.json_response(answer())

    def _answer_world(self) -> dict[str, Any] | None:
        return {**self.world, "complete": self.complete} if self.world else None

    async def _wait(self, request: web.Request, news: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(float(request.query["wait"])), self._changed:
                await self._changed.wait_for(lambda: news() or self._runner is None)
        except TimeoutError:
            pass
        if self._runner is None:
            raise web.HTTPServiceUnavailable
