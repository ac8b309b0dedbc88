"""Workflows that began before the first key was made, and whose payloads are therefore not encrypted.

A job that was running when encryption began continues with its agents, which may be of a release that cannot encrypt.
The server's own record of when a workflow's first run began decides: no one can start a workflow in the past.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from temporalio.client import Client

from perdure.base.executions import find

_VALID_FOR = 0.1
"""Seconds for which an answer is used while many payloads are decoded: a history has thousands, and an ID that is
taken by a new workflow must not be trusted for the older one's sake."""

_CALL_TIMEOUT = timedelta(seconds=5)


class EarlierRuns:
    """Finds out which workflows began before a time."""

    def __init__(self, before: datetime) -> None:
        self._before = before
        self._asked: dict[str, float] = {}
        """The workflows that did, with the time of the server's answer."""
        self.client: Client | None = None

    async def includes(self, workflow_id: str) -> bool:
        """Whether the workflow that has this ID now began before the time.

        Raises:
            RPCError: if the server does not answer.
        """
        asked = self._asked.get(workflow_id)
        if asked is not None and time.monotonic() - asked < _VALID_FOR:
            return True
        return await self._ask(workflow_id)

    async def still(self, workflow_id: str) -> bool:
        """The same for a workflow one of whose payloads was not encrypted; False for others, without a call."""
        return workflow_id in self._asked and await self._ask(workflow_id)

    async def _ask(self, workflow_id: str) -> bool:
        if self.client is None:
            return False
        asked = time.monotonic()
        found = await find(self.client, workflow_id, rpc_timeout=_CALL_TIMEOUT)
        if found is None or found.began >= self._before:
            self._asked.pop(workflow_id, None)
            return False
        self._asked[workflow_id] = asked
        return True
