"""Logs of nodes that this machine cannot reach, read piece by piece through their agents."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import datetime

from perdure.base.errors import LogsUnavailable, PerdureError
from perdure.client.connection import Connection
from perdure.client.logs.lines import Lines, PrintedLine
from perdure.client.questions import Unanswered, ask_node
from perdure.contract import LogChunk, LogPosition, NodeId, ReadLog

LINES = 1000
"""The number of last lines that are read by default: every piece goes through the Temporal server."""

Ask = Callable[[ReadLog], Awaitable[LogChunk]]
"""Sends the request to the node's agent, and returns its answer."""


class AgentLog:
    """Reads one node's log from its last position, for as long as its agent answers."""

    def __init__(self, ask: Ask, node: NodeId) -> None:
        self._ask = ask
        self._node = node
        self._position: LogPosition | None = None
        self._lines = Lines()
        self._tail: int | None = LINES
        """The number of last lines with which reading begins."""
        self._since: datetime | None = None
        self.end: LogPosition | None = None
        """The end of the log in the agent's lease: only if it has moved, there is something to request."""

    async def old_lines(self, tail: int | None, since: datetime | None) -> AsyncGenerator[PrintedLine]:
        """Yields the last lines.

        Raises:
            LogsUnavailable: if the agent does not answer.
        """
        self._tail = LINES if tail is None and since is None else tail
        self._since = since
        async for line in self._read():
            yield line

    async def new_lines(self) -> AsyncGenerator[PrintedLine]:
        """Yields lines added since the last call, as far as the lease shows; nothing while the agent is silent."""
        if self.end is not None and self.end != self._position:
            try:
                async for line in self._read():
                    yield line
            except PerdureError:
                return

    def last_line(self) -> Sequence[PrintedLine]:
        """The text after the last line break, if there is any."""
        return self._lines.rest()

    async def _read(self) -> AsyncGenerator[PrintedLine]:
        at_end = False
        while not at_end:
            request = ReadLog(**dict(self._node), position=self._position, lines=self._tail, since=self._since)
            chunk = await self._ask(request)
            self._position, at_end = chunk.position, chunk.at_end
            for line in self._lines.add_piece(chunk):
                yield line


async def ask_agent(connection: Connection, job_id: str, request: ReadLog) -> LogChunk:
    """Has a node's agent answer with a piece of its log.

    Raises:
        LogsUnavailable: if it does not.
    """
    try:
        return await ask_node(connection, job_id, request, LogChunk)
    except Unanswered as error:
        raise LogsUnavailable(
            f"the agent of node {request.rank} does not answer",
            remedy="Its node may be gone, or just starting: `perdure nodes`. outputs.logs in the job's specification "
            "copies every log to a place of your choice.",
        ) from error
