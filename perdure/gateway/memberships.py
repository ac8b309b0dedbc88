"""What the gateway knows of jobs that machines join: their tickets, and which machine has which place.

The job decides both, so the gateway asks it, and remembers the answer for a moment: one query serves all machines of a
job.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Final

from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.credentials.grants import Grant
from perdure.base.credentials.tickets import digest_of
from perdure.base.executions import QueryRejected, query
from perdure.client.connection import CALL_TIMEOUT
from perdure.contract import MachinesView, Ticket
from perdure.gateway.callers import PlaceLost, Unauthenticated, Unavailable
from perdure.gateway.limits import NEWCOMERS, Limits
from perdure.gateway.lru_cache import LruCache

logger = logging.getLogger(__name__)

_VALID_SECONDS: Final = 30.0
"""The time for which an answer is used: a machine that lost its place can report for as long."""
_SETTLED_SECONDS: Final = 1.0
"""The least time between two queries of a job for machines or tickets that its last answer lacks: they may be newer.
Their callers wait meanwhile."""
_STALE_SECONDS: Final = 3600.0
"""The time for which it is used while the job does not answer: reports must outlast an outage of the workers."""
_REMEMBERED: Final = 2_000
"""Jobs; a job of a thousand machines takes about 200 KB."""


class _Known:
    def __init__(self, view: MachinesView | None, at: float) -> None:
        self.view = view
        """None: the server knows no such job."""
        self.at = at

    @property
    def age(self) -> float:
        return time.monotonic() - self.at


class Memberships:
    """The machines and tickets of jobs."""

    def __init__(self, temporal: TemporalClient) -> None:
        """Creates the object.

        Args:
            temporal: Connected to the namespace of the jobs.
        """
        self._temporal = temporal
        self._known = LruCache[str, _Known](_REMEMBERED)
        self._newcomers = Limits(NEWCOMERS)
        self._queries: dict[str, asyncio.Task[_Known]] = {}

    async def ticket(self, job_id: str, secret: str, *, address: str) -> Ticket:
        """Returns the ticket of this secret.

        Args:
            job_id: The job that the caller names.
            secret: Shown by the caller.
            address: Where the caller connects from.

        Raises:
            Unauthenticated: if the job has none, or there is no such job.
            Unavailable: if the job cannot be asked.
            TooMany: if the address shows too many unknown tickets.
        """
        digest = digest_of(secret)

        def found(view: MachinesView) -> Ticket | None:
            return next((one for one in view.tickets if hmac.compare_digest(one.digest, digest)), None)

        known = self._known.get(job_id)
        if known and known.view and known.age < _VALID_SECONDS and (ticket := found(known.view)):
            return ticket
        with self._newcomers.one_call(address):
            view = await self._newer_view(job_id)
        if view and (ticket := found(view)):
            return ticket
        raise Unauthenticated(f"the ticket is not one of {job_id}, or was revoked")

    async def check(self, grant: Grant) -> None:
        """Checks that a machine still has the place of its grant.

        Raises:
            PlaceLost: if it does not.
            Unavailable: if the job cannot be asked.
        """
        if _has_place(await self._view(grant.job_id, _VALID_SECONDS), grant):
            return
        if not _has_place(await self._newer_view(grant.job_id), grant):
            raise PlaceLost("the machine does not have this place any more")

    async def _newer_view(self, job_id: str) -> MachinesView | None:
        """Returns what the job answers now, for a machine or a ticket that may be newer than the last answer."""
        known = self._known.get(job_id)
        if known and known.age < _SETTLED_SECONDS:
            await asyncio.sleep(_SETTLED_SECONDS - known.age)
        return await self._view(job_id, _SETTLED_SECONDS)

    async def _view(self, job_id: str, longest: float) -> MachinesView | None:
        """Returns an answer of the job that is at most `longest` seconds old; None if there is no such job."""
        known = self._known.get(job_id)
        if known and known.age < longest:
            return known.view
        asking = self._queries.get(job_id)
        if asking is None:
            asking = self._queries[job_id] = asyncio.create_task(self._query(job_id))
            asking.add_done_callback(lambda ended: self._forget(job_id, ended))
        try:
            # A caller that hangs up does not end the query that others wait for.
            return (await asyncio.shield(asking)).view
        except Unavailable:
            if known is None or known.age > _STALE_SECONDS:
                raise
            logger.warning("job %s does not answer: its machines keep the slots that it reported last", job_id)
            return known.view

    async def _query(self, job_id: str) -> _Known:
        began = time.monotonic()
        try:
            job = self._temporal.get_workflow_handle(job_id)
            view = await query(job, "machines", result_type=MachinesView, rpc_timeout=CALL_TIMEOUT)
        except (RPCError, WorkflowQueryFailedError, QueryRejected) as error:
            if not isinstance(error, RPCError) or error.status is not RPCStatusCode.NOT_FOUND:
                raise Unavailable(f"{job_id} does not answer which machines it has: {error}") from error
            view = None
        known = _Known(view, began)
        self._known.put(job_id, known)
        return known

    def _forget(self, job_id: str, ended: asyncio.Task[_Known]) -> None:
        self._queries.pop(job_id, None)
        if not ended.cancelled():
            # All callers that waited may have hung up; asyncio would log that the error was not read.
            ended.exception()


def _has_place(view: MachinesView | None, grant: Grant) -> bool:
    place = (grant.rank, grant.incarnation, grant.machine)
    machines = view.machines if view and view.uid == grant.uid else ()
    return any((one.rank, one.incarnation, one.session) == place for one in machines)
