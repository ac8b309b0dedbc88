"""The launcher's session with the agent. The agent may be away at any time, which must not stop training, so its
requests are sent until there is an answer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from perdure_training.node_api.agent_client import (
    REQUEST_TIMEOUT,
    AgentAway,
    AgentConnection,
    AgentRefused,
    Json,
    pauses,
)
from perdure_training.node_api.bodies import PROTOCOL, Body, HelloAnswer, protocol_mismatch
from perdure_training.node_api.codec import decode

logger = logging.getLogger(__name__)

LONG_POLL = 25.0
"""Seconds for which the agent may hold a long poll."""
LONG_POLL_TIMEOUT = LONG_POLL + REQUEST_TIMEOUT


class AgentSession:
    """A client's session with the agent, across any number of connections and restarts of the agent.

    A request that finds the agent gone makes every later one begin with a new greeting, so that a restarted agent knows
    the client before it receives anything else.
    """

    def __init__(
        self,
        *,
        socket_path: Path,
        hello_path: str,
        hello: Callable[[], Body],
        on_return: Callable[[], None] | None = None,
    ) -> None:
        """Creates the session; nothing is sent before the first call.

        Args:
            socket_path: The agent's socket.
            hello_path: The path of the greeting.
            hello: Creates the greeting.
            on_return: Called after each greeting except the first, by the thread that sent it.
        """
        self._socket_path = socket_path
        self._hello_path = hello_path
        self._hello = hello
        self._on_return = on_return
        self._closed = threading.Event()
        self._news = threading.Event()
        """Set when the agent is back or the session is closed: no request pauses any longer."""
        self._greeting = threading.Lock()
        self._greeted = False
        self._refusal = ""
        """Why the last greeting was refused."""
        self._greetings = 0

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Makes every call return None soon."""
        self._closed.set()
        self._news.set()

    def connect(self) -> AgentConnection:
        return AgentConnection(self._socket_path)

    def call(
        self,
        connection: AgentConnection,
        method: str,
        path: str | Callable[[], str],
        body: Body | None = None,
        *,
        within: float = REQUEST_TIMEOUT,
    ) -> Json | None:
        """Sends a request until there is an answer; returns None once the session is closed.

        Args:
            connection: The calling thread's own connection.
            method: GET or POST.
            path: The path; a callable is called for each attempt.
            body: The body to post.
            within: Seconds for one attempt.

        Raises:
            AgentRefused: if the agent rejects the request as invalid.
        """
        for pause in pauses():
            if self.closed:
                break
            try:
                self._greet(connection)
                return connection.request(method, path if isinstance(path, str) else path(), body, within=within)
            except AgentAway as away:
                if self._greeted:
                    self._greeted = False
                    self._news.clear()
                    logger.info("%s; retrying until it is back", away)
                # Wakes early: otherwise it could rely on a greeting that a later agent has not received.
                self._news.wait(pause)
        return None

    def _greet(self, connection: AgentConnection) -> None:
        if self._greeted:
            return
        with self._greeting:
            if self._greeted:
                return
            try:
                answer = decode(HelloAnswer, connection.request("POST", self._hello_path, self._hello()))
                if mismatch := protocol_mismatch(launcher=PROTOCOL, agent=answer.protocol):
                    raise AgentRefused(mismatch)
            except AgentRefused as refused:
                # Retried, since the agent may be replaced; logged once.
                if str(refused) != self._refusal:
                    self._refusal = str(refused)
                    logger.error("%s", refused)
                raise AgentAway("the agent refused the first request") from refused
            self._refusal = ""
            self._greeted = True
            self._greetings += 1
            self._news.set()
            returned = self._greetings > 1
        if returned and self._on_return:
            self._on_return()


@dataclass(frozen=True)
class _Letter:
    path: str
    body: Body
    delivered: Callable[[], None] | None


class Outbox(threading.Thread):
    """Delivers posts in order, each until the agent has received it."""

    def __init__(self, session: AgentSession, *, name: str = "outbox") -> None:
        super().__init__(name=name, daemon=True)
        self._session = session
        self._letters: deque[_Letter] = deque()
        self._changed = threading.Condition()

    def post(self, path: str, body: Body, *, delivered: Callable[[], None] | None = None) -> None:
        """Adds a post and returns at once; `delivered` is called by the outbox's thread."""
        with self._changed:
            self._letters.append(_Letter(path, body, delivered))
            self._changed.notify_all()

    def holds(self, path: str) -> bool:
        """Returns whether a post to this path waits for delivery."""
        with self._changed:
            return any(letter.path == path for letter in self._letters)

    def flush(self, timeout: timedelta) -> bool:
        """Waits until all posts are delivered; returns False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._letters, timeout.total_seconds())

    def run(self) -> None:
        connection = self._session.connect()
        while not self._session.closed:
            with self._changed:
                self._changed.wait_for(lambda: self._letters)
                letter = self._letters[0]
            delivered = False
            try:
                delivered = self._session.call(connection, "POST", letter.path, letter.body) is not None
            except AgentRefused as refused:
                logger.error("the agent refused a report to %s, and it is dropped: %s", letter.path, refused)
            with self._changed:
                self._letters.popleft()
                self._changed.notify_all()
            if delivered and letter.delivered:
                letter.delivered()
