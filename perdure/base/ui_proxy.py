"""Serves the local default's Temporal UI to this machine's own names, and to no web page.

The dev server's UI answers whatever name a browser knows it by. A page whose own name leads to 127.0.0.1 (DNS
rebinding) is of the same origin as that UI, and can read what it shows and do what it does. So the UI listens where no
page finds it, and this proxy before it passes on only requests whose `Host` is a name of this machine itself.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp import web

logger = logging.getLogger(__name__)

_OWN_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_LONGEST_REQUEST = 8 * 1024 * 1024
"""Bytes; Temporal's server takes 4 MB at most."""
_NOT_PASSED_ON = frozenset({"connection", "host", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})
"""Headers about one connection, in lower case."""


@asynccontextmanager
async def ui_proxy(ui: str, backend: str) -> AsyncGenerator[None]:
    """Serves while the context is open.

    Args:
        ui: Address of the UI, as browsers know it; empty: nothing is served.
        backend: Address at which the UI listens; empty: nothing is served.
    """
    if not (ui and backend):
        yield
        return
    address = urlsplit(ui)
    async with aiohttp.ClientSession(backend, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as session:
        application = web.Application(client_max_size=_LONGEST_REQUEST, middlewares=[refuse_pages])
        application.router.add_route("*", "/{path:.*}", _Front(session).pass_on)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, address.hostname, address.port).start()
        except OSError as error:
            logger.warning("the Temporal UI is not served: %s cannot be listened at: %s", ui, error)
        try:
            yield
        finally:
            await runner.cleanup()


@web.middleware
async def refuse_pages(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuses what a browser sends to a server of this machine for a page that is not the server's own."""
    origin = request.headers.get("Origin")
    if _split(f"//{request.host}").hostname not in _OWN_NAMES:
        raise web.HTTPForbidden(text=f"{request.host} is not a name of this machine: use 127.0.0.1 or localhost\n")
    if origin is not None and _split(origin).netloc != request.host:
        raise web.HTTPForbidden(text=f"requests of pages of {origin} are refused\n")
    return await handler(request)


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # Brackets that are not an address.
        return urlsplit("")


class _Front:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _NOT_PASSED_ON]
        content = await request.read()
        try:
            async with self._session.request(
                request.method, request.rel_url, headers=headers, data=content or None, allow_redirects=False
            ) as answer:
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                for name, value in answer.headers.items():
                    if name.lower() not in _NOT_PASSED_ON:
                        response.headers.add(name, value)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError:
            raise web.HTTPBadGateway(text="the Temporal server does not run; `perdure worker --detach`\n") from None
