"""The agent's face towards the node's own processes: HTTP on `agent.sock`, as docs/node-protocol.md has it.

Clients may run as another user in another container, so the socket is open to all who can reach the folder.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from agent.node import Node
from agent.protocol import (
    LONGEST_WAIT,
    SOCKET_NAME,
    Body,
    EnteredBody,
    ExitedBody,
    FinishedBody,
    HandlerHello,
    LauncherHello,
    LeaveBody,
    LeavingBody,
    ReadyBody,
    SupersededBody,
    UnprotectedBody,
    UsageBody,
)
from agent.telemetry import Telemetry

logger = logging.getLogger(__name__)

_REQUEST_MAX = 4 * 1024 * 1024
_Said = TypeVar("_Said", bound=Body)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NodeServer:
    """Serves one node's socket."""

    def __init__(
        self, node: Node, telemetry: Telemetry, run_dir: Path, *, on_hello: Callable[[LauncherHello], None]
    ) -> None:
        self._node = node
        self._path = run_dir / SOCKET_NAME

        def hello(body: LauncherHello) -> None:
            node.launcher_hello(body)
            on_hello(body)

        def leave(body: LeaveBody) -> None:
            node.leave(body.reason)

        app = web.Application(client_max_size=_REQUEST_MAX, middlewares=[_answer_errors])
        app.add_routes(
            [
                web.post("/v1/launcher/hello", _says(LauncherHello, hello)),
                web.get("/v1/launcher/desired", self._desired),
                web.post("/v1/launcher/leaving", _says(LeavingBody, node.ended_from_outside)),
                web.post("/v1/launcher/exited", _says(ExitedBody, node.exited)),
                web.post("/v1/launcher/ready", _says(ReadyBody, node.ready)),
                web.post("/v1/launcher/entered", _says(EnteredBody, node.entered)),
                web.post("/v1/launcher/finished", _says(FinishedBody, node.finished)),
                web.post("/v1/launcher/usage", _says(UsageBody, telemetry.usage)),
                web.post("/v1/launcher/unprotected", _says(UnprotectedBody, node.unprotected)),
                web.post("/v1/leave", _says(LeaveBody, leave)),
                web.post("/v1/rendezvous/hello", _says(HandlerHello, node.handler_hello)),
                web.post("/v1/rendezvous/ready", _says(ReadyBody, node.ready)),
                web.get("/v1/rendezvous/world", self._world),
                web.post("/v1/rendezvous/entered", _says(EnteredBody, node.entered)),
                web.post("/v1/rendezvous/finished", _says(FinishedBody, node.finished)),
                web.post("/v1/rendezvous/superseded", _says(SupersededBody, node.superseded)),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    async def start(self) -> None:
        """Listens. A socket left behind by an earlier agent is replaced in one step, so no client finds none."""
        await self._runner.setup()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        draft = self._path.with_name(f".sock{os.getpid()}")
        draft.unlink(missing_ok=True)
        listener.bind(str(draft))
        draft.chmod(0o666)
        listener.listen(128)
        draft.replace(self._path)
        await web.SockSite(self._runner, listener).start()

    async def _desired(self, request: web.Request) -> web.Response:
        version = _number(request, "version", 0)
        await self._node.changed.wait_for(lambda: self._node.desired.version != version, within=_wait(request))
        return _json(self._node.desired)

    async def _world(self, request: web.Request) -> web.Response:
        after = _number(request, "after", 0)
        complete = _number(request, "complete", self._node.state.complete)
        # A handler that names no stage has found an agent of another release at its start, and takes any world.
        stage = _number(request, "stage", -1)
        stages = _number(request, "stages", self._node.state.stages_complete)
        await self._node.changed.wait_for(
            lambda: self._node.has_news(after=after, complete=complete, stage=stage, stages=stages),
            within=_wait(request),
        )
        return _json(self._node.world_for(stage))


class _Refused(Exception):
    """The request is wrong; the message says what was expected."""


def _says(model: type[_Said], hear: Callable[[_Said], None]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = model.model_validate_json(await request.read())
        except ValidationError as error:
            raise _Refused(str(error)) from None
        hear(body)
        return web.json_response({})

    return handle


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
        return min(max(float(text), 0.0), LONGEST_WAIT)
    except ValueError:
        raise _Refused(f"wait is {text!r}; expected a number of seconds") from None


def _json(body: Body) -> web.Response:
    return web.Response(text=body.model_dump_json(), content_type="application/json")
