"""A small HTTP server for processes of which each node has one: aiohttp's would be a fifth of their memory.

h11 reads and writes the protocol. Requests are answered one after another on each connection; what a client sends
beyond the one that is being answered stays in the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, TypeAlias, cast
from urllib.parse import parse_qsl, unquote

import h11

logger = logging.getLogger(__name__)

_RECEIVED_AT_ONCE: Final = 4 * 1024
"""Bytes that are read from a connection at once: what a client sends may stay in memory for a while."""
_REST: Final = 10.0
"""Seconds for which the rest of a request is taken that was refused."""
_BODY: Final = 60.0
"""Seconds within which a whole body has to arrive."""
_IDLE: Final = 3600.0
"""Seconds without a request after which a connection ends."""
_YIELDS: Final = 5.0
"""Seconds without a request after which a connection ends where its place is needed."""

Event: TypeAlias = (
    h11.Request | h11.Data | h11.EndOfMessage | h11.ConnectionClosed | type[h11.NEED_DATA] | type[h11.PAUSED]
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, with its whole body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By name in lowercase."""
    body: bytes = b""
    reached: str = ""
    """The address of this machine at which it arrived; empty for a socket in a folder."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer."""

    body: bytes
    status: int = HTTPStatus.OK
    content_type: str = "application/json"


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, reason: str = "") -> None:
        """Creates the error; by default the reason is the status's own."""
        super().__init__(reason or status.phrase)
        self.status = status


class _TooSlow(Exception):
    """A client does not send the body that it has announced. It is not answered: one that was only slow, as after a
    suspension of its machine, sends its request again, which has not been handled."""


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
Turn: TypeAlias = Callable[[], Awaitable[None]]


def error_response(path: str, status: int, reason: str) -> Response:
    """The answer to a request that fails."""
    return Response(body=json.dumps({"error": f"{path}: {reason}"}).encode(), status=status)


async def _at_once() -> None:
    return


@dataclass(frozen=True, kw_only=True)
class HttpServer:
    """What connections have in common. It listens where `accept` is the factory of a server's protocols."""

    handlers: Mapping[tuple[str, str], Handler]
    """By method and path. A path that ends with `/` is that of all that have one more name."""
    largest_body: int
    """Bytes."""
    most_connections: int
    """Where there are as many, a further one takes the place of the one that has sent no request for longest; it is
    closed at once while all others have requests in progress."""
    turn: Turn = _at_once
    """Is awaited between the head of a request and its body."""
    on_refused: Callable[[Request, Refused], Response] = lambda request, refused: error_response(
        request.path, refused.status, str(refused)
    )
    """Makes the answer to a request that is refused."""
    open: set[_Connection] = field(default_factory=set)

    def accept(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        if len(self.open) >= self.most_connections:
            self._end_idle()
        return _Connection(self) if len(self.open) < self.most_connections else _Full()

    def _end_idle(self) -> None:
        """Ends the connection that has sent no request for longest, if that is long."""
        idle = [(one.idle_since, one) for one in self.open if one.idle_since is not None]
        since, longest = min(idle, key=lambda found: found[0], default=(math.inf, None))
        if longest is not None and asyncio.get_running_loop().time() - since >= _YIELDS:
            self.open.discard(longest)
            longest.abort()

    def close(self) -> None:
        """Ends all connections, and what is being answered on them."""
        for connection in tuple(self.open):
            connection.abort()

    def handler(self, request: Request) -> Handler:
        """The handler of a request.

        Raises:
            Refused: if there is none.
        """
        parent, _, name = request.path.rpartition("/")
        paths = {request.path, f"{parent}/"} if name else set[str]()
        found = {method: handler for (method, path), handler in self.handlers.items() if path in paths}
        if not found:
            raise Refused(HTTPStatus.NOT_FOUND)
        if request.method not in found:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED)
        return found[request.method]


class _Full(asyncio.Protocol):
    """A connection that is ended at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


class _Connection(asyncio.Protocol):
    """A connection of the server's, one of those that are open."""

    idle_since: float | None = None
    """When it began to wait for the head of a request; None while one is in progress. A head that arrives byte by byte
    is none."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER)
        self._transport: Any = None
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._reads = False
        self._method = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.max_size = _RECEIVED_AT_ONCE  # pyrefly: ignore[missing-attribute]
        self._server.open.add(self)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        # The end of a connection is noticed only while it is read, so it is read until more than one request is there.
        if not self._reads:
            self._transport.pause_reading()
        self._http.receive_data(data)
        self._arrived.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open.discard(self)
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        self._transport.abort()

    async def _serve(self) -> None:
        try:
            while await self._answer_next():
                self._http.start_next_cycle()
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)
        except _TooSlow as error:
            logger.debug("a connection ends: %s", error)
        except h11.LocalProtocolError as error:
            logger.warning("a connection ends: %s", error)
        finally:
            self._transport.close()

    async def _answer_next(self) -> bool:
        """Answers the next request. Returns whether there may be another one."""
        self.idle_since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(_IDLE):
                event = await self._next()
        except TimeoutError:
            return False
        self.idle_since = None
        if not isinstance(event, h11.Request):
            return False
        self._method = event.method
        await self._server.turn()
        await self._send(await self._answer(_request_of(event, self._reached())))
        await self._leave_out_the_rest()
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _leave_out_the_rest(self) -> None:
        """Takes what a client still sends of a request that was answered: it reads the answer only after that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REST):
                while self._http.their_state is h11.SEND_BODY:
                    await self._next()

    async def _answer(self, request: Request) -> Response:
        try:
            handler = self._server.handler(request)
            try:
                async with asyncio.timeout(_BODY):
                    body = await self._body()
            except TimeoutError:
                raise _TooSlow(f"the body of {request.path} has not arrived within {_BODY:.0f} s") from None
            return await handler(replace(request, body=body))
        except Refused as refused:
            return self._server.on_refused(request, refused)
        except (h11.RemoteProtocolError, h11.LocalProtocolError, _TooSlow):
            raise
        except Exception:
            logger.exception("%s cannot be answered", request.path)
            return error_response(request.path, 500, HTTPStatus.INTERNAL_SERVER_ERROR.phrase)

    async def _body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self._next(), h11.Data):
            body += event.data
            if len(body) > self._server.largest_body:
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return bytes(body)

    async def _next(self) -> Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=100, headers=[]))
            self._arrived.clear()
            self._reads = True
            self._transport.resume_reading()
            try:
                await self._arrived.wait()
            finally:
                self._reads = False
        return event  # pyrefly: ignore[bad-return]

    async def _send(self, response: Response) -> None:
        headers = [("Content-Type", response.content_type), ("Content-Length", str(len(response.body)))]
        self._write(h11.Response(status_code=response.status, headers=headers, reason=_reason(response.status)))
        if self._method != b"HEAD":
            self._write(h11.Data(data=response.body))
        self._write(h11.EndOfMessage())
        await self._writable.wait()

    async def _refuse(self, status: int) -> None:
        """Answers what is no HTTP. It is not logged: anyone who reaches the socket could fill the log."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._send(error_response("", status, "no request"))

    def _write(self, event: Any) -> None:
        self._transport.write(self._http.send(event) or b"")

    def _reached(self) -> str:
        own: Any = self._transport.get_extra_info("sockname")
        return str(own[0]) if isinstance(own, tuple) and own else ""  # pyrefly: ignore[unknown-argument-type]


def _reason(status: int) -> bytes:
    return HTTPStatus(status).phrase.encode()


def _request_of(event: h11.Request, reached: str) -> Request:
    path, _, query = event.target.decode("latin-1").partition("?")
    return Request(
        method=event.method.decode("latin-1"),
        path=unquote(path),
        query=dict(parse_qsl(query, keep_blank_values=True)),
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers},
        reached=reached,
    )
