"""A server of pages over played jobs, and a browser's part that has opened its link."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from benchmarks.recovery.processes import free_port
from perdure.page import looks, server
from perdure.page.server import serve_pages
from tests.page.played import PlayedClient, PlayedJob, failed, interrupted

SPEC = {"name": "llama", "roles": {"worker": {"command": ["torchrun", "train.py", "<script>"]}}}


async def spec_of_all(*_: object, **__: object) -> Mapping[str, Any]:
    return SPEC


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> PlayedClient:
    """Two jobs: one that was interrupted and steps again, and one that has failed."""
    monkeypatch.setattr(looks, "recorded_spec", spec_of_all)
    monkeypatch.setattr(looks, "_FULLY", timedelta())
    monkeypatch.setattr(server, "_INTERVAL", timedelta(seconds=0.05))
    monkeypatch.setattr(server, "_LIST_INTERVAL", timedelta(seconds=0.05))
    return PlayedClient(PlayedJob(interrupted()), PlayedJob(failed(), name="gpt"))


class Visitor:
    """What a browser does with the pages."""

    def __init__(self, link: str, session: aiohttp.ClientSession) -> None:
        self.link = URL(link)
        self.session = session

    def url(self, path: str) -> URL:
        return URL(f"{self.link.origin()}{path}", encoded=True)

    async def get(self, path: str, *, status: int = 200, **headers: str) -> str:
        async with self.session.get(self.url(path), headers=headers) as answer:
            assert answer.status == status
            return await answer.text()

    async def post(self, path: str, form: Mapping[str, str], *, status: int = 200, origin: str = "") -> str:
        headers = {"Origin": origin or str(self.link.origin())}
        async with self.session.post(self.url(path), data=dict(form), headers=headers) as answer:
            assert answer.status == status
            return await answer.text()

    async def hidden(self, path: str) -> dict[str, str]:
        """The hidden fields of the form that a page shows."""
        return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', await self.get(path)))


@pytest.fixture
async def stranger(client: PlayedClient) -> AsyncIterator[Visitor]:
    """A visitor without the token."""
    async with unknown(client) as visitor:
        yield visitor


@asynccontextmanager
async def unknown(client: PlayedClient, **options: Any) -> AsyncIterator[Visitor]:
    """A visitor without the token, of a server with these options."""
    async with (
        serve_pages(client, port=0, **options) as link,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        yield Visitor(link, session)


async def admitted(stranger: Visitor) -> Visitor:
    """The visitor, after opening the link."""
    async with stranger.session.get(stranger.link) as answer:
        assert answer.status == 200
        assert "token" not in str(answer.url)
    return stranger


@asynccontextmanager
async def served(client: PlayedClient, **options: Any) -> AsyncIterator[Visitor]:
    """A visitor who has opened the link of a server with these options."""
    async with unknown(client, **options) as stranger:
        yield await admitted(stranger)


@asynccontextmanager
async def proxied(client: PlayedClient, *, strips: bool, keeps_name: bool) -> AsyncIterator[Visitor]:
    """A visitor who has opened the link of a server behind a proxy that shows it below /perdure.

    Args:
        client: What the server shows.
        strips: The proxy removes its path.
        keeps_name: The proxy sends its own name on, and not the one by which it knows the server.
    """
    server_port, proxy_port = free_port(), free_port()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server_port}", cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            path = str(request.rel_url).removeprefix("/perdure") if strips else str(request.rel_url)
            headers = {
                key: value for key, value in request.headers.items() if key in ("Cookie", "Origin", "Content-Type")
            }
            if keeps_name:
                headers["Host"] = request.host
            body = await request.read()
            async with session.request(
                request.method, URL(path, encoded=True), headers=headers, data=body or None, allow_redirects=False
            ) as answer:
                names = ("Set-Cookie", "Location", "Content-Type")
                kept = {key: answer.headers[key] for key in names if key in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                with suppress(ConnectionError):  # The browser has left.
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
                return response

        application = web.Application()
        application.router.add_route("*", "/perdure/{rest:.*}", pass_on)
        runner = web.AppRunner(application, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", proxy_port).start()
            url = f"http://127.0.0.1:{proxy_port}/perdure/"
            async with (
                serve_pages(client, port=server_port, url=url) as link,
                aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser_session,
            ):
                assert link.startswith(url)
                yield await admitted(Visitor(link, browser_session))
        finally:
            await runner.cleanup()


@pytest.fixture
async def visitor(stranger: Visitor) -> Visitor:
    """A visitor who has opened the link."""
    return await admitted(stranger)
