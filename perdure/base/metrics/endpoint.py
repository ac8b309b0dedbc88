"""Serves metrics over HTTP: `GET /metrics` on a port, for Prometheus.

Any page in a browser on the same machine can send requests to a port of loopback, and reads the answer if its own name
leads there (DNS rebinding). So a request that reaches loopback must name loopback or an address as its host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

logger = logging.getLogger(__name__)

ALL_INTERFACES: Final = "0.0.0.0"

_SCRAPES_AT_ONCE: Final = 4
"""Scrapes that wait for each other, at most; there are two Prometheus servers of a site, perhaps."""
_SHUTDOWN: Final = 1.0
"""Seconds for which the end of the process waits for a scrape."""

Collect = Callable[[], Awaitable[bytes]]
"""Returns all metrics in Prometheus' text format."""


@asynccontextmanager
async def serving_metrics(
    collect: Collect, port: int | None, *, host: str = ALL_INTERFACES, required: bool = True
) -> AsyncGenerator[int | None]:
    """Answers `GET /metrics` while the context is open.

    Args:
        collect: Is called for each scrape, one at a time. If it raises, Prometheus records a failed scrape.
        port: The port; 0 for one that is free, None to serve nothing.
        host: The address to listen on.
        required: Whether a port that is taken is an error; otherwise it is logged, and nothing is served.

    Yields:
        The port.

    Raises:
        OSError: if the port is taken and required.
    """
    if port is None:
        yield None
        return
    runner = web.AppRunner(_application(collect), access_log=None, shutdown_timeout=_SHUTDOWN)
    await runner.setup()
    try:
        yield await _listen(runner, host, port, required=required)
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int, *, required: bool) -> int | None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        if required:
            raise
        logger.error("metrics are not served: port %d: %s", port, error.strerror)
        return None
    return int(runner.addresses[0][1])


def _application(collect: Collect) -> web.Application:
    turn = asyncio.Lock()
    waiting = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal waiting
        _refuse_pages(request)
        if waiting >= _SCRAPES_AT_ONCE:
            raise web.HTTPServiceUnavailable(text="too many scrapes at once\n")
        waiting += 1
        try:
            async with turn:
                content = await collect()
        except Exception as error:
            # The text of an exception may contain anything, and anyone may scrape.
            logger.exception("a scrape failed")
            raise web.HTTPInternalServerError(text="the metrics could not be read; see the log\n") from error
        finally:
            waiting -= 1
        return web.Response(body=content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application(client_max_size=1024)
    application.router.add_get("/metrics", answer)
    return application


def _refuse_pages(request: web.Request) -> None:
    transport = request.transport
    own: Any = transport.get_extra_info("sockname") if transport is not None else None
    reached = str(own[0]) if own else ""
    if "Origin" in request.headers or (_is_loopback(reached) and not _names_address(request.host)):
        raise web.HTTPForbidden(text="scrape this port by the address of its machine\n")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return True


def _names_address(host: str) -> bool:
    """Whether a request's host is `localhost` or an address, which no page can have as the name of its own site."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
