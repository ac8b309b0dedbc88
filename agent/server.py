"""The agent's interface to the node's own processes: HTTP on `agent.sock`, as specified in docs/node-protocol.md.

Clients may run as another user in another container, so every process that can reach the folder can use the socket.
What one of them sends in a loop must not cost the node its lease: connections, bodies and requests per second are
bounded, and a request beyond that waits. It is not refused, since the launcher's own may be the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

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
from perdure.base.http_server import Handler, HttpServer, Refused, Request, Response, error_response
from perdure.contract.base import Message
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
_BACKLOG = 16
"""Connections that wait. asyncio accepts them all at once, and closes a few turns later those that are refused."""
REQUESTS_AT_ONCE = 200
REQUESTS_PER_SECOND = 100.0
"""The pace of requests in a loop, far above that of a launcher and its handlers."""
_Body = TypeVar("_Body", bound=Body)


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

        self._http = HttpServer(
            handlers={
                ("POST", "/v1/launcher/hello"): _post(LauncherHello, launcher_hello),
                ("GET", "/v1/launcher/desired"): self._desired,
                ("POST", "/v1/launcher/leaving"): _post(LeavingReport, node.on_leaving),
                ("POST", "/v1/launcher/exited"): _post(CommandExit, node.on_exited),
                ("POST", "/v1/launcher/ready"): _post(ReadyReport, node.on_ready),
                ("POST", "/v1/launcher/entered"): _post(EnteredReport, node.on_entered),
                ("POST", "/v1/launcher/finished"): _post(FinishedReport, node.on_finished),
                ("POST", "/v1/launcher/restoring"): _post(RestoringReport, restoring),
                ("POST", "/v1/launcher/usage"): _post(UsageReport, telemetry.usage),
                ("POST", "/v1/launcher/unmanaged"): _post(UnmanagedReport, node.on_unmanaged),
                ("POST", "/v1/launcher/stacks"): _post(StacksReport, stacks.on_report),
                ("POST", "/v1/launcher/checks"): _post(ChecksReport, checks.on_report),
                ("POST", "/v1/leave"): _post(LeaveRequest, leave),
                ("POST", "/v1/rendezvous/hello"): _post(HandlerHello, handler_hello),
                ("POST", "/v1/rendezvous/ready"): _post(ReadyReport, node.on_ready),
                ("GET", "/v1/rendezvous/world"): self._world,
                ("POST", "/v1/rendezvous/entered"): _post(EnteredReport, node.on_entered),
                ("POST", "/v1/rendezvous/finished"): _post(FinishedReport, node.on_finished),
                ("POST", "/v1/rendezvous/superseded"): _post(SupersededReport, node.on_superseded),
                ("POST", "/v1/datasets/"): self._exchange,
                ("POST", "/v1/store"): self._call_store,
                ("GET", "/metrics"): self._read_metrics,
            },
            largest_body=_REQUEST_MAX,
            most_connections=_CONNECTIONS_MAX,
            turn=_Pace().turn,
            on_refused=_refuse,
        )
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        """Starts to listen, in the place of an earlier agent."""
        listener = listen_beneath(self._run_dir, AGENT_SOCKET, backlog=_BACKLOG)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(self._http.accept, sock=listener, backlog=_BACKLOG)

    def close(self) -> None:
        """Stops to listen, and ends all connections."""
        if self._listening is not None:
            self._listening.close()
        self._http.close()

    async def _desired(self, request: Request) -> Response:
        version = _number(request, "version", 0)
        await self._node.changed.wait_for(lambda: self._node.state.desired.version != version, within=_wait(request))
        return _json(self._node.state.desired)

    async def _world(self, request: Request) -> Response:
        after = _number(request, "after", 0)
        complete = _number(request, "complete", self._node.state.complete)
        stage = _number(request, "stage", 0)
        stages = _number(request, "stages", self._node.state.stages_complete)
        await self._node.changed.wait_for(
            lambda: self._node.state.has_news(after=after, complete=complete, stage=stage, stages=stages),
            within=_wait(request),
        )
        return _json(self._node.state.world_answer(stage))

    async def _read_metrics(self, _: Request) -> Response:
        if self._metrics is None:
            raise Refused(HTTPStatus.NOT_FOUND)
        return Response(body=await self._metrics(), content_type="text/plain; version=0.0.4")

    async def _exchange(self, request: Request) -> Response:
        return await _answer_rank(self._datasets.exchange(request.path.rpartition("/")[2], request.body))

    async def _call_store(self, request: Request) -> Response:
        return await _answer_rank(self._store.answer(request.body))


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


def _post(kind: type[_Body], receive: Callable[[_Body], Body | None]) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            body = read_body(kind, request.body)
        except Malformed as error:
            raise _bad(str(error)) from None
        return _json(receive(body) or {})

    return handle


async def _answer_rank(answer: Awaitable[Message]) -> Response:
    try:
        return _json(await answer)
    except RefusedRequest as error:
        raise _bad(str(error)) from None
    except NotNow as error:
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None


def _check_protocol(hello: LauncherHello | HandlerHello) -> None:
    if mismatch := protocol_mismatch(launcher=hello.protocol, agent=PROTOCOL):
        raise _bad(mismatch)


def _bad(reason: str) -> Refused:
    """A request that is invalid; the reason says what was expected."""
    return Refused(HTTPStatus.BAD_REQUEST, reason)


def _refuse(request: Request, refused: Refused) -> Response:
    if refused.status is HTTPStatus.BAD_REQUEST:
        logger.warning("%s refused: %s", request.path, refused)
    return error_response(request.path, refused.status, str(refused))


def _number(request: Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise _bad(f"{name} is {text!r}; expected a whole number") from None


def _wait(request: Request) -> float:
    text = request.query.get("wait", "0")
    try:
        return bounded_wait(float(text))
    except ValueError:
        raise _bad(f"wait is {text!r}; expected a number of seconds") from None


def _json(body: Body | Message | dict[str, object]) -> Response:
    return Response(body=to_json(body))
