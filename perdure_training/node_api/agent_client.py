"""The client of the agent's socket, for launcher, torchrun's handler and ranks, so that all treat its absence alike.

The agent may be starting, restarting or stuck at any time, which must not stop training. A request ends with an answer,
with `AgentAway`, after which the same request may be sent again, or with `AgentRefused`, after which it may not.
docs/node-protocol.md describes the requests.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from perdure_training.node_api.bodies import Body
from perdure_training.node_api.codec import encode, encode_essentials
from perdure_training.node_api.layout import AGENT_SOCKET
from perdure_training.node_api.rank_environment import is_rank, run_directory_of

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 10.0
"""Seconds after which a silent agent counts as gone, where it answers at once."""
_HOLDING_TIMEOUT = 60.0
"""Seconds where it holds a request until there is an answer: for 20, and then says that it must be sent again."""

Json = dict[str, Any]


class AgentAway(Exception):
    """The agent did not answer, or said that it must be asked again; the same request can be sent again."""


class AgentRefused(Exception):
    """The agent does not take the request, however often it is sent; the message says why."""


class AgentConnection:
    """A connection to the agent, for one thread at a time. A request connects again where it was lost."""

    def __init__(self, socket_path: Path) -> None:
        """Creates the object; the first request connects."""
        self._http = _UnixConnection(socket_path)

    def request(
        self, method: str, path: str, body: Body | Json | None = None, *, within: float = REQUEST_TIMEOUT
    ) -> Json:
        """Sends one request, and returns the answer.

        A `Body` that the agent cannot parse is sent again without its texts, since they alone come from outside.

        Args:
            method: GET or POST.
            path: The path of the request.
            body: Its content.
            within: Seconds to wait for the answer.

        Raises:
            AgentAway: if there was no answer, or the agent says that it must be asked again.
            AgentRefused: if the request is invalid.
        """
        content = encode(body) if isinstance(body, Body) else json.dumps(body).encode() if body is not None else None
        status, answer = self._exchange(method, path, content, within)
        if isinstance(body, Body) and 400 <= status < 500:
            logger.error("the agent cannot parse %s, so it gets the report without texts: %s", path, _shorten(answer))
            status, answer = self._exchange(method, path, encode_essentials(body), within)
        try:
            parsed: Any = json.loads(answer)
        except ValueError:
            parsed = None
        if status == http.HTTPStatus.OK and isinstance(parsed, dict):
            return cast("Json", parsed)
        problem = cast("Json", parsed).get("error") if isinstance(parsed, dict) else None
        kind = AgentRefused if 400 <= status < 500 else AgentAway
        raise kind(str(problem or f"{method} {path}: {status} {_shorten(answer)}"))

    def close(self) -> None:
        self._http.close()

    def _exchange(self, method: str, path: str, content: bytes | None, within: float) -> tuple[int, bytes]:
        """Returns the answer's status and content.

        Raises:
            AgentAway: if no answer came.
        """
        self._http.timeout = within
        if self._http.sock is not None:
            self._http.sock.settimeout(within)
        try:
            self._http.request(method, path, content, {"Content-Type": "application/json"} if content else {})
            response = self._http.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise AgentAway(f"the agent does not answer: {error}") from error


class Agent:
    """The agent of the node. Each request has a connection of its own: the agent serves few at a time."""

    def __init__(self, socket_path: Path) -> None:
        """Creates the object; nothing is sent before the first request."""
        self._socket_path = socket_path

    def post(self, path: str, body: Body | Json, *, within: float = _HOLDING_TIMEOUT) -> Json:
        """Posts one request, and returns the answer; arguments and errors are those of `AgentConnection.request`."""
        with closing(AgentConnection(self._socket_path)) as connection:
            return connection.request("POST", path, body, within=within)


def find_agent(environment: Mapping[str, str] = os.environ) -> Agent | None:
    """Returns the agent that serves this process; None if Perdure did not start it as a rank."""
    run_directory = run_directory_of(environment)
    return Agent(run_directory / AGENT_SOCKET) if run_directory is not None and is_rank(environment) else None


def pauses(*, first: float = 0.05, longest: float = 1.0) -> Iterator[float]:
    """Yields the seconds to wait before each further attempt of a request: they double, up to the longest."""
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, longest)


def connect(socket_path: Path, *, within: float | None) -> socket.socket:
    """Connects to one of the agent's sockets.

    Args:
        socket_path: The socket.
        within: Seconds that this and each later use of the connection may take.

    Raises:
        OSError: if the agent does not listen.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(within)
        connection.connect(str(socket_path))
    except BaseException:
        connection.close()
        raise
    return connection


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, socket_path: Path) -> None:
        super().__init__("agent")
        self._socket_path = socket_path

    def connect(self) -> None:
        self.sock = connect(self._socket_path, within=self.timeout)


def _shorten(content: bytes) -> str:
    return content[:500].decode(errors="replace")
