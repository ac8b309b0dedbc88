"""Serves the local default's Temporal UI to this machine's own names, and to no web page.

The dev server's UI answers whatever name a browser knows it by. A page whose own name leads to 127.0.0.1 (DNS
rebinding) is of the same origin as that UI, and can read what it shows and do what it does. So the UI listens where no
page finds it, and this proxy before it passes on only requests whose `Host` is a name of this machine itself.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

logger = logging.getLogger(__name__)

_OWN_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_LONGEST_REQUEST = 8 * 1024 * 1024
"""Bytes; Temporal's server takes 4 MB at most."""
_NOT_PASSED_ON = frozenset({"connection", "host", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})
"""Headers about one connection, in lower case."""


_NO_PROXY = urlsplit("")


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


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def refuse_pages(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuses what a browser sends to a server of this machine for a page that is not the server's own."""
    _refuse(request, _NO_PROXY)
    return await handler(request)


def refuse_pages_of_others(shown_as: SplitResult) -> Middleware:
    """Returns what does the same for a server that a proxy also shows.

    Args:
        shown_as: The address at which the proxy shows it; empty: there is none.
    """

    @web.middleware
    async def refuse(request: web.Request, handler: _Handler) -> web.StreamResponse:
        _refuse(request, shown_as)
        return await handler(request)

    return refuse


def _refuse(request: web.Request, shown_as: SplitResult) -> None:
    origin = request.headers.get("Origin")
    by_proxy = bool(shown_as.netloc) and request.host == shown_as.netloc
    if not by_proxy and _split(f"//{request.host}").hostname not in _OWN_NAMES:
        raise web.HTTPForbidden(text=f"{request.host} is not a name of this machine: use 127.0.0.1 or localhost\n")
    if origin is None or _split(origin).netloc == request.host:
        return
    # A proxy may send the name by which it knows this server instead of its own.
    if not shown_as.netloc or origin != f"{shown_as.scheme}://{shown_as.netloc}":
        raise web.HTTPForbidden(text=f"requests of pages of {origin} are refused\n")


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
                # A browser that leaves a page ends its long polls: no error of ours.
                with suppress(ConnectionResetError):
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                return response
        except aiohttp.ClientConnectorError:
            raise web.HTTPBadGateway(text="the Temporal server does not run; `perdure worker --detach`\n") from None
