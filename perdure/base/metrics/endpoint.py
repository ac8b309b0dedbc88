"""Serves metrics over HTTP: `GET /metrics` on a port, for Prometheus.

Any page in a browser on the same machine can send requests to a port of loopback, and reads the answer if its own name
leads there (DNS rebinding). So a request that reaches loopback must name loopback or an address as its host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Final

from perdure.base.http_server import HttpServer, Refused, Request, Response
from perdure.base.listening import listening_sockets

logger = logging.getLogger(__name__)

_SCRAPES_AT_ONCE: Final = 4
"""Scrapes that wait for each other, at most; there are two Prometheus servers of a site, perhaps."""
_CONNECTIONS: Final = 64
_CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"
"""That of Prometheus' text format."""

Collect = Callable[[], Awaitable[bytes]]
"""Returns all metrics in Prometheus' text format."""


@asynccontextmanager
async def serving_metrics(
    collect: Collect, port: int | None, *, host: str = "", required: bool = True
) -> AsyncGenerator[int | None]:
    """Answers `GET /metrics` while the context is open.

    Args:
        collect: Is called for each scrape, one at a time. If it raises, Prometheus records a failed scrape.
        port: The port; 0 for one that is free, None to serve nothing.
        host: The address to listen on; empty for all of this machine's, of both families.
        required: Whether a port that is taken is an error; otherwise it is logged, and nothing is served.

    Yields:
        The port.

    Raises:
        OSError: if the port is taken and required.
    """
    if port is None:
        yield None
        return
    http = HttpServer(
        handlers={("GET", "/metrics"): _answering(collect)},
        largest_body=1024,
        most_connections=_CONNECTIONS,
        on_refused=lambda _, refused: _text(f"{refused}\n".encode(), refused.status),
    )
    sockets = _listen(host, port, required=required)
    async with AsyncExitStack() as serving:
        serving.callback(http.close)
        for one in sockets:
            serving.callback((await asyncio.get_running_loop().create_server(http.accept, sock=one)).close)
        yield sockets[0].getsockname()[1] if sockets else None


def _listen(host: str, port: int, *, required: bool) -> list[socket.socket]:
    try:
        return listening_sockets(host, port)
    except OSError as error:
        if required:
            raise
        logger.error("metrics are not served: port %d: %s", port, error.strerror)
        return []


def _answering(collect: Collect) -> Callable[[Request], Awaitable[Response]]:
    turn = asyncio.Lock()
    waiting = 0

    async def answer(request: Request) -> Response:
        nonlocal waiting
        _refuse_pages(request)
        if waiting >= _SCRAPES_AT_ONCE:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many scrapes at once")
        waiting += 1
        try:
            async with turn:
                content = await collect()
        except Exception as error:
            # The text of an exception may contain anything, and anyone may scrape.
            logger.exception("a scrape failed")
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the metrics could not be read; see the log") from error
        finally:
            waiting -= 1
        return _text(content)

    return answer


def _text(content: bytes, status: int = HTTPStatus.OK) -> Response:
    return Response(body=content, status=status, content_type=_CONTENT_TYPE)


def _refuse_pages(request: Request) -> None:
    host = request.headers.get("host", "")
    if "origin" in request.headers or (_is_loopback(request.reached) and not _names_address(host)):
        raise Refused(HTTPStatus.FORBIDDEN, "scrape this port by the address of its machine")


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
