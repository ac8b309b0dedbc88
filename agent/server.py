"""The agent's interface to the node's own processes: HTTP on `agent.sock`, as specified in docs/node-protocol.md.

Clients may run as another user in another container, so every process that can reach the folder can use the socket.
What one of them sends in a loop must not cost the node its lease: connections, bodies and requests per second are
bounded, and a request beyond that waits. It is not refused, since the launcher's own may be the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic_core import to_json

from perdure.agent.checks import Checker
from perdure.agent.datasets import Datasets
from perdure.agent.node import Node
from perdure.agent.protocol import Malformed, bounded_wait, read_body
from perdure.agent.pump import NotNow, RefusedRequest
from perdure.agent.sockets import listen_beneath
from perdure.agent.stacks import StackReader
from perdure.agent.store import StoreRelay
from perdure.agent.telemetry import Telemetry
from perdure.contract import Message
from perdure_training.node_api.bodies import (
    PROTOCOL,
    Body,
    ChecksReport,
    CommandExit,
    EnteredReport,
    FinishedReport,
    HandlerHello,
    HelloAnswer,
    LauncherHello,
    LeaveRequest,
    LeavingReport,
    ReadyReport,
    RestoringReport,
    StacksReport,
    SupersededReport,
    UnmanagedReport,
    UsageReport,
    protocol_mismatch,
)
from perdure_training.node_api.layout import AGENT_SOCKET

logger = logging.getLogger(__name__)

_REQUEST_MAX = 1024 * 1024
"""The largest body in bytes. Clients repeat a report that is larger without its texts."""
_CONNECTIONS_MAX = 64
"""Connections at a time. A node has one of its launcher's and one of each torchrun's handler, which exist before any
training code does; those beyond that are closed at once."""
_RECEIVED_AT_ONCE = 4 * 1024
"""Bytes that are read from a connection at once."""
REQUESTS_AT_ONCE = 200
REQUESTS_PER_SECOND = 100.0
"""The pace of requests in a loop, far above that of a launcher and its handlers."""
_Body = TypeVar("_Body", bound=Body)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NodeServer:
    """Serves one node's socket."""

    def __init__(
        self,
        node: Node,
        telemetry: Telemetry,
        run_dir: Path,
        *,
        datasets: Datasets,
        store: StoreRelay,
        stacks: StackReader,
        checks: Checker,
        metrics: Callable[[], Awaitable[bytes]] | None = None,
        on_hello: Callable[[LauncherHello], None],
        on_waits: Callable[[], None],
    ) -> None:
        self._node = node
        self._datasets = datasets
        self._store = store
        self._metrics = metrics
        self._run_dir = run_dir

        def launcher_hello(body: LauncherHello) -> HelloAnswer:
            _check_protocol(body)
            node.on_launcher_hello(body)
            on_hello(body)
            return HelloAnswer()

        def handler_hello(body: HandlerHello) -> HelloAnswer:
            _check_protocol(body)
            node.on_handler_hello(body)
            return HelloAnswer()

        def restoring(body: RestoringReport) -> None:
            node.on_restoring(body)
            on_waits()

        def leave(body: LeaveRequest) -> None:
            node.depart(body.reason, save=body.save)

        pace = _Pace()

        @web.middleware
        async def in_turn(request: web.Request, handler: Handler) -> web.StreamResponse:
            await pace.turn()
            return await handler(request)

        app = web.Application(client_max_size=_REQUEST_MAX, middlewares=[in_turn, _answer_errors])
        app.add_routes(
            [
                web.post("/v1/launcher/hello", _post(LauncherHello, launcher_hello)),
                web.get("/v1/launcher/desired", self._desired),
                web.post("/v1/launcher/leaving", _post(LeavingReport, node.on_leaving)),
                web.post("/v1/launcher/exited", _post(CommandExit, node.on_exited)),
                web.post("/v1/launcher/ready", _post(ReadyReport, node.on_ready)),
                web.post("/v1/launcher/entered", _post(EnteredReport, node.on_entered)),
                web.post("/v1/launcher/finished", _post(FinishedReport, node.on_finished)),
                web.post("/v1/launcher/restoring", _post(RestoringReport, restoring)),
                web.post("/v1/launcher/usage", _post(UsageReport, telemetry.usage)),
                web.post("/v1/launcher/unmanaged", _post(UnmanagedReport, node.on_unmanaged)),
                web.post("/v1/launcher/stacks", _post(StacksReport, stacks.on_report)),
                web.post("/v1/launcher/checks", _post(ChecksReport, checks.on_report)),
                web.post("/v1/leave", _post(LeaveRequest, leave)),
                web.post("/v1/rendezvous/hello", _post(HandlerHello, handler_hello)),
                web.post("/v1/rendezvous/ready", _post(ReadyReport, node.on_ready)),
                web.get("/v1/rendezvous/world", self._world),
                web.post("/v1/rendezvous/entered", _post(EnteredReport, node.on_entered)),
                web.post("/v1/rendezvous/finished", _post(FinishedReport, node.on_finished)),
                web.post("/v1/rendezvous/superseded", _post(SupersededReport, node.on_superseded)),
                web.post("/v1/datasets/{name}", self._exchange),
                web.post("/v1/store", self._call_store),
                web.get("/metrics", self._read_metrics),
            ]
        )
        _SERVER_LOG.addFilter(_is_no_client_error)
        self._runner = web.AppRunner(
            app, logger=_SERVER_LOG, access_log=None, handle_signals=False, handler_cancellation=True
        )
        self._listening: asyncio.Server | None = None
        self._open: set[_Connection] = set()

    async def start(self) -> None:
        """Starts to listen, in the place of an earlier agent."""
        await self._runner.setup()
        listener = listen_beneath(self._run_dir, AGENT_SOCKET, backlog=_CONNECTIONS_MAX)
        self._listening = await asyncio.get_running_loop().create_unix_server(self._accept, sock=listener)

    def _accept(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        server = self._runner.server
        assert server is not None
        return _Connection(server(), self._open) if len(self._open) < _CONNECTIONS_MAX else _Full()

    async def _desired(self, request: web.Request) -> web.Response:
        version = _number(request, "version", 0)
        await self._node.changed.wait_for(lambda: self._node.state.desired.version != version, within=_wait(request))
        return _json(self._node.state.desired)

    async def _world(self, request: web.Request) -> web.Response:
        after = _number(request, "after", 0)
        complete = _number(request, "complete", self._node.state.complete)
        stage = _number(request, "stage", 0)
        stages = _number(request, "stages", self._node.state.stages_complete)
        await self._node.changed.wait_for(
            lambda: self._node.state.has_news(after=after, complete=complete, stage=stage, stages=stages),
            within=_wait(request),
        )
        return _json(self._node.state.world_answer(stage))

    async def _read_metrics(self, _: web.Request) -> web.Response:
        if self._metrics is None:
            raise web.HTTPNotFound
        return web.Response(body=await self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _exchange(self, request: web.Request) -> web.Response:
        return await _answer_rank(self._datasets.exchange(request.match_info["name"], await request.read()))

    async def _call_store(self, request: web.Request) -> web.Response:
        return await _answer_rank(self._store.answer(await request.read()))


_SERVER_LOG = logging.getLogger("agent.http")


def _is_no_client_error(record: logging.LogRecord) -> bool:
    """Leaves out clients that send no HTTP: the server would log what each has sent, with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


class _Connection(asyncio.Protocol):
    """A connection of the server's, one of those that are open."""

    def __init__(self, served: asyncio.Protocol, others: set[_Connection]) -> None:
        self._served = served
        self._open = others

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What a client sends at once stays in memory for a while where it is not HTTP.
        cast("Any", transport).max_size = _RECEIVED_AT_ONCE
        self._open.add(self)
        self._served.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._served.data_received(data)

    def eof_received(self) -> bool | None:
        return self._served.eof_received()

    def pause_writing(self) -> None:
        self._served.pause_writing()

    def resume_writing(self) -> None:
        self._served.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._served.connection_lost(exc)


class _Full(asyncio.Protocol):
    """A connection that is ended at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


class _Pace:
    """Lets requests begin in the order of their arrival, at a bounded pace after a burst."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._full_at = 0.0
        """The time at which the whole burst is available again."""

    async def turn(self) -> None:
        """Returns when the next request may begin."""
        # A client that is gone leaves the queue, so that only those wait for each other that are there.
        async with self._turn:
            now = asyncio.get_running_loop().time()
            self._full_at = max(self._full_at, now) + 1 / REQUESTS_PER_SECOND
            await asyncio.sleep(self._full_at - now - REQUESTS_AT_ONCE / REQUESTS_PER_SECOND)


class _Refused(Exception):
    """The request is invalid; the message says what was expected."""


def _post(kind: type[_Body], receive: Callable[[_Body], Body | None]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = read_body(kind, await request.read())
        except Malformed as error:
            raise _Refused(str(error)) from None
        return _json(receive(body) or {})

    return handle


async def _answer_rank(answer: Awaitable[Message]) -> web.Response:
    try:
        return _json(await answer)
    except RefusedRequest as error:
        raise _Refused(str(error)) from None
    except NotNow as error:
        raise web.HTTPServiceUnavailable(reason=str(error)) from None


def _check_protocol(hello: LauncherHello | HandlerHello) -> None:
    if mismatch := protocol_mismatch(launcher=hello.protocol, agent=PROTOCOL):
        raise _Refused(mismatch)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _Refused as error:
        logger.warning("%s refused: %s", request.path, error)
        return web.json_response({"error": f"{request.path}: {error}"}, status=400)
    except web.HTTPException as error:
        return web.json_response({"error": f"{request.path}: {error.reason}"}, status=error.status)


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise _Refused(f"{name} is {text!r}; expected a whole number") from None


def _wait(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    try:
        return bounded_wait(float(text))
    except ValueError:
        raise _Refused(f"wait is {text!r}; expected a number of seconds") from None


def _json(body: Body | Message | dict[str, object]) -> web.Response:
    return web.Response(body=to_json(body), content_type="application/json")
