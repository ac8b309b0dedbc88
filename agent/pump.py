"""Sends what ranks request of a workflow that accompanies their job, until it has been taken.

The workflow is started by the node's group when the server does not know it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from perdure.agent.outbox import ControlPlaneBusy, DestinationNotFound
from perdure.base.backoff import Backoff

logger = logging.getLogger(__name__)

_NEEDED_AGAIN = 10.0
"""Seconds before the agent requests a workflow again that does not exist yet. Its group starts it within a second."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 3.0

_Waiting = TypeVar("_Waiting")


class RefusedRequest(Exception):
    """A rank's request is invalid; the message says why."""


class NotNow(Exception):
    """The control plane has not answered yet; the rank asks again."""


class Pump(Generic[_Waiting]):
    """Sends batch after batch while there are any, one at a time."""

    def __init__(
        self,
        what: str,
        *,
        take: Callable[[], Sequence[_Waiting]],
        send: Callable[[Sequence[_Waiting]], Awaitable[None]],
        need: Callable[[Sequence[_Waiting]], None],
    ) -> None:
        """Creates the pump; nothing is sent before `start`.

        Args:
            what: What it sends to, for the log.
            take: Returns what is to be sent next; nothing: the pump stops until it is started again.
            send: Sends it, and hands over the answers. It is called again with what `take` returns after an error.
            need: Requests the workflow, because the server does not know it.
        """
        self._what = what
        self._take = take
        self._send = send
        self._need = need
        self._task: asyncio.Task[None] | None = None
        self._needed_at = -_NEEDED_AGAIN

    @property
    def runs(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        """Begins to send, unless it does already."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            while batch := self._take():
                try:
                    await self._send(batch)
                except Exception as error:
                    if isinstance(error, DestinationNotFound):
                        self._request(batch)
                    elif not isinstance(error, ControlPlaneBusy):
                        logger.warning("%s did not answer, retrying: %s", self._what, error)
                    # Agents whose calls failed together must not retry together.
                    await asyncio.sleep(backoff.next_pause() * random.uniform(0.5, 1.0))
                else:
                    backoff.reset()
        finally:
            self._task = None

    def _request(self, batch: Sequence[_Waiting]) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._needed_at >= _NEEDED_AGAIN:
            self._needed_at = now
            self._need(batch)
