"""Queries whether a job still exists. Agents without a lease and watches do this before they let training end.

Names are used again and databases are restored, so only the job's own first run ID is proof.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from temporalio.client import Client

from perdure.base.executions import OPEN, began_at, find, quoted
from perdure.contract.names import NODE_GROUP

MISSING_FOR_GOOD = 3
"""Answers in a row without a job, from a server that knows the job's group, that count as proof that it was deleted.
After a failover, another cluster may know the group a little earlier than its job."""


class JobLiveness(StrEnum):
    """The state of a job according to the control plane."""

    OPEN = "OPEN"
    CLOSED = "CLOSED"
    """The run with the job's own first run ID has closed: the only proof that training has no owner."""
    NOT_FOUND = "NOT_FOUND"
    """The server does not know the job. That is not proof: its database may be restored, or the address may be another
    namespace's."""


async def query_job_liveness(client: Client, *, job_id: str, first_run_id: str, rpc_timeout: timedelta) -> JobLiveness:
    """Queries the server. Raises the error of the connection if there is no answer."""
    newest = await find(client, job_id, rpc_timeout=rpc_timeout)
    if newest is None:
        return JobLiveness.NOT_FOUND
    if newest.first_run_id == first_run_id:
        return JobLiveness.OPEN if newest.is_open else JobLiveness.CLOSED
    # Another job has the name. If it began later, this job must have closed before, even if the server has forgotten
    # it.
    if _began_after(newest.first_run_id, first_run_id):
        return JobLiveness.CLOSED
    ours = await find(client, job_id, run_id=first_run_id, rpc_timeout=rpc_timeout)
    return JobLiveness.NOT_FOUND if ours is None else JobLiveness.CLOSED


async def has_groups(client: Client, job_id: str, uid: str, *, rpc_timeout: timedelta) -> bool:
    """Returns whether groups of a job's run are open: those of a job that was terminated wind down by themselves."""
    query = f"WorkflowType = '{NODE_GROUP}' AND {OPEN} AND WorkflowId STARTS_WITH {quoted(f'{job_id}/{uid}/')}"
    return (await client.count_workflows(query, rpc_timeout=rpc_timeout)).count > 0


class OwnerLiveness:
    """The liveness of a job, queried repeatedly on behalf of an open workflow that the job has begun.

    A server that knows that workflow has known its job. If it does not any more, an operator has deleted the job, or
    the job closed longer ago than the server's retention: nothing else would end the workflow then, or its nodes.
    """

    def __init__(
        self, client: Client, *, job_id: str, first_run_id: str, owned_id: str, rpc_timeout: timedelta
    ) -> None:
        """Creates the object.

        Args:
            client: A client of the workflow's namespace.
            job_id: The job's workflow ID.
            first_run_id: The job's first run ID.
            owned_id: The ID of the workflow that the job has begun.
            rpc_timeout: The timeout of each call.
        """
        self._client = client
        self._job_id = job_id
        self._first_run_id = first_run_id
        self._owned_id = owned_id
        self._rpc_timeout = rpc_timeout
        self._missing = 0
        """The number of answers in a row without the job."""

    async def query(self) -> JobLiveness:
        """Queries the server. Raises the error of the connection if there is no answer."""
        liveness = await query_job_liveness(
            self._client, job_id=self._job_id, first_run_id=self._first_run_id, rpc_timeout=self._rpc_timeout
        )
        if liveness is not JobLiveness.NOT_FOUND:
            self._missing = 0
            return liveness
        owned = await find(self._client, self._owned_id, rpc_timeout=self._rpc_timeout)
        self._missing = self._missing + 1 if owned is not None and owned.is_open else 0
        return JobLiveness.CLOSED if self._missing >= MISSING_FOR_GOOD else JobLiveness.NOT_FOUND


def _began_after(one: str, other: str) -> bool:
    """Returns whether a run began after another, by the time in their IDs; False if the IDs have none."""
    first, second = began_at(one), began_at(other)
    return first is not None and second is not None and first > second
