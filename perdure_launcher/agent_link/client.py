"""HTTP client of the agent. The agent may be away at any time, which must not stop training, so clients retry
indefinitely."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from perdure_training.node_api.bodies import PROTOCOL, Body, HelloAnswer, protocol_mismatch
from perdure_training.node_api.codec import decode, encode, encode_essentials

logger = logging.getLogger(__name__)

LONG_POLL = timedelta(seconds=25)
"""Longest time for which the agent may hold a long poll."""
REQUEST_TIMEOUT = timedelta(seconds=10)
"""Time after which a silent agent counts as gone, and the request is retried on a new connection."""
SHORTEST_PAUSE = timedelta(milliseconds=50)
LONGEST_PAUSE = timedelta(seconds=1)


class AgentGone(Exception):
    """The agent did not answer: it is starting, restarting or stuck. A retry may succeed."""


class AgentRefused(Exception):
    """The agent answered that the request is invalid. A retry would fail as well."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("agent")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class AgentConnection:
    """One connection to the agent, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._http = _UnixConnection(path)

    def request(
        self, method: str, path: str, body: Body | None = None, *, timeout: timedelta = REQUEST_TIMEOUT
    ) -> dict[str, Any]:
        """Asks once; what the agent cannot parse is sent again without its texts, since they alone come from outside.

        Returns:
            The answer, for `codec.decode`.

        Raises:
            AgentGone: if no answer came.
            AgentRefused: if the agent rejected the request as invalid.
        """
        status, content = self._exchange(method, path, encode(body) if body else None, timeout)
        if body and 400 <= status < 500:
            logger.error("the agent cannot parse %s, so it gets the report without texts: %s", path, _shorten(content))
            status, content = self._exchange(method, path, encode_essentials(body), timeout)
        if 400 <= status < 500:
            raise AgentRefused(f"{method} {path}: {status} {_shorten(content)}")
        try:
            answer: Any = json.loads(content)
        except ValueError as error:
            raise AgentGone(f"{method} {path}: {status} without JSON") from error
        if status != 200 or not isinstance(answer, dict):
            raise AgentGone(f"{method} {path}: {status} {_shorten(content)}")
        return cast("dict[str, Any]", answer)

    def _exchange(self, method: str, path: str, data: bytes | None, timeout: timedelta) -> tuple[int, bytes]:
        """Returns the answer's status and content.

        Raises:
            AgentGone: if no answer came.
        """
        self._http.timeout = timeout.total_seconds()
        if self._http.sock is not None:
            self._http.sock.settimeout(timeout.total_seconds())
        try:
            self._http.request(method, path, body=data, headers={"Content-Type": "application/json"} if data else {})
            response = self._http.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise AgentGone(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._http.close()


def _shorten(content: bytes) -> str:
    return content[:500].decode(errors="replace")


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
        timeout: timedelta = REQUEST_TIMEOUT,
    ) -> dict[str, Any] | None:
        """Sends a request until there is an answer; returns None once the session is closed.

        Args:
            connection: The calling thread's own connection.
            method: GET or POST.
            path: The path; a callable is called for each attempt.
            body: The body to post.
            timeout: The timeout of one attempt.

        Raises:
            AgentRefused: if the agent rejects the request as invalid.
        """
        pause = SHORTEST_PAUSE
        while not self._closed.is_set():
            try:
                self._greet(connection)
                return connection.request(method, path if isinstance(path, str) else path(), body, timeout=timeout)
            except AgentGone as gone:
                if self._greeted:
                    self._greeted = False
                    self._news.clear()
                    logger.info("the agent is away (%s); retrying until it is back", gone)
                # Wakes early: otherwise it could rely on a greeting that a later agent has not received.
                self._news.wait(pause.total_seconds())
                pause = min(pause * 1.5, LONGEST_PAUSE)
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
                raise AgentGone("it refused the first request") from refused
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
                logger.error("the agent refused what the launcher reported, and it is dropped: %s", refused)
            with self._changed:
                self._letters.popleft()
                self._changed.notify_all()
            if delivered and letter.delivered:
                letter.delivered()
