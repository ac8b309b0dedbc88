"""Whether the command of a role that serves others answers, so that its node is reported as ready no earlier.

The agent shares the node's network with the command, so it asks as the command's clients do.
"""

from __future__ import annotations

import asyncio

from perdure.agent.node import Node
from perdure.spec.readiness import Readiness
from perdure_training.node_api.addresses import host_and_port

_ANSWER_WITHIN = 5.0
"""Seconds for one answer: a server that is busy with its start may be slow."""
_PAUSE = 0.5
"""Seconds between two questions."""


class ReadinessProbe:
    """Asks the node's command until it answers, once for each world that the node enters."""

    def __init__(self, node: Node, ready: Readiness) -> None:
        self._node = node
        self._ready = ready
        self.ready_in = 0
        """The newest generation in which the command has answered."""

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            await self._node.changed.wait_for(self._is_due)
            generation = self._node.state.entered
            if await answers(self._node.config.address, self._ready):
                self.ready_in = generation
            else:
                await asyncio.sleep(_PAUSE)

    def _is_due(self) -> bool:
        state = self._node.state
        return state.has_ranks and self.ready_in < state.entered


async def answers(address: str, ready: Readiness) -> bool:
    """Returns whether a server accepts a connection, and answers with a status of 2xx where a path is given."""
    try:
        async with asyncio.timeout(_ANSWER_WITHIN):
            reader, writer = await asyncio.open_connection(address, ready.port)
            try:
                if ready.http is None:
                    return True
                host = host_and_port(address, ready.port)
                request = f"GET {ready.http} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                writer.write(request.encode())
                _, _, status = (await reader.readline()).partition(b" ")
                return status.startswith(b"2")
            finally:
                writer.close()
    except (OSError, ValueError):
        # A line that is too long is no answer.
        return False
