"""How a rank reaches the agent of its node: HTTP on a Unix socket, as docs/node-protocol.md describes it."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure_training.node_api.layout import AGENT_SOCKET
from perdure_training.node_api.rank_environment import is_rank, run_directory_of

_ANSWER_WITHIN = 60.0
"""Seconds: the agent answers within 20, if only to say that it must be asked again."""

Json = dict[str, Any]


class Away(Exception):
    """There was no answer; the same request can be sent again."""


class AgentRefused(Exception):
    """The agent does not take the request, however often it is sent."""


class Agent:
    """The agent of the node. Each request has a connection of its own: the agent serves few at a time."""

    def __init__(self, path: Path) -> None:
        """Creates the object.

        Args:
            path: The agent's socket.
        """
        self._path = path

    def post(self, path: str, body: Json, *, within: float = _ANSWER_WITHIN) -> Json:
        """Sends one request, and returns the answer.

        Args:
            path: The path of the request.
            body: Its content.
            within: Seconds to wait for the answer.

        Raises:
            Away: if there was no answer, or the agent says that it must be asked again.
            AgentRefused: if the request is invalid.
        """
        connection = _UnixConnection(str(self._path), within)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Away(f"the agent does not answer: {error}") from error
        finally:
            connection.close()
        if response.status == http.HTTPStatus.OK:
            return content
        problem = str(content.get("error", response.status))
        if response.status == http.HTTPStatus.BAD_REQUEST:
            raise AgentRefused(problem)
        raise Away(problem)


def find_agent(environment: Mapping[str, str] = os.environ) -> Agent | None:
    """Returns the agent that serves this process; None if Perdure did not start it as a rank."""
    run_directory = run_directory_of(environment)
    return Agent(run_directory / AGENT_SOCKET) if run_directory is not None and is_rank(environment) else None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, within: float) -> None:
        super().__init__("agent", timeout=within)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
