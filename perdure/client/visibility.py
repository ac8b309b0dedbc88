"""Jobs in Temporal's visibility: read without querying the job, so also if no worker answers."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable

from temporalio.client import Client as TemporalClient
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.executions import OPEN, Execution, ExecutionStatus, list_executions, quoted
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.views import JobSummary
from perdure.contract import JobPhase
from perdure.contract.names import TRAINING_JOB
from perdure.workflows.search_attributes import JOB_BACKEND, JOB_OWNER, JOB_PHASE, JOB_RESTARTS, WORLD_SIZE

_JOB_ID = re.compile(r"job/([^/]+)/([^/]+)")
_PHASES_OF_ENDS = {
    ExecutionStatus.COMPLETED: JobPhase.SUCCEEDED,
    ExecutionStatus.FAILED: JobPhase.FAILED,
    ExecutionStatus.TIMED_OUT: JobPhase.FAILED,
    ExecutionStatus.CANCELED: JobPhase.CANCELLED,
    ExecutionStatus.TERMINATED: JobPhase.CANCELLED,
}


async def newest_jobs(
    temporal: TemporalClient, *conditions: str, limit: int
) -> AsyncGenerator[tuple[Execution, JobSummary]]:
    """Yields jobs, the newest first; of several runs with one name, the newest.

    Args:
        temporal: The connection.
        conditions: Further conditions of Temporal's list filters.
        limit: The most jobs to yield.
    """
    query = " AND ".join((f"WorkflowType = '{TRAINING_JOB}'", *conditions))
    seen: set[str] = set()
    async for execution in list_executions(temporal, query, rpc_timeout=CALL_TIMEOUT):
        summary = summary_of(execution)
        if summary and execution.id not in seen:
            seen.add(execution.id)
            yield execution, summary
        if len(seen) >= limit:
            break


def phase_of(execution: Execution) -> JobPhase | None:
    """The job's phase; None if the namespace has no search attributes and the job has not closed."""
    if ended := _PHASES_OF_ENDS.get(execution.status):
        return ended
    shown = execution.search_attributes.get(JOB_PHASE)
    return JobPhase(shown) if shown else None


def summary_of(execution: Execution) -> JobSummary | None:
    """The job as an entry of a list; None if the workflow is not a job."""
    match = _JOB_ID.fullmatch(execution.id)
    if not match:
        return None
    attributes = execution.search_attributes
    return JobSummary(
        name=match[2],
        namespace=match[1],
        workflow_id=execution.id,
        run_id=execution.run_id,
        phase=phase_of(execution),
        backend=attributes.get(JOB_BACKEND) or "",
        owner=attributes.get(JOB_OWNER) or "",
        world_size=attributes.get(WORLD_SIZE),
        restarts=attributes.get(JOB_RESTARTS),
        started_at=execution.start_time,
        finished_at=execution.close_time,
    )


async def open_workflows_of(temporal: TemporalClient, job_id: str, *, known: Iterable[str] = ()) -> list[str]:
    """The IDs of a job and of the open workflows that belong to it.

    Args:
        temporal: The connection.
        job_id: The job's workflow ID.
        known: IDs that do if the server has no capacity to list others now; none: the listing waits for it.

    Raises:
        RPCError: if the server does not answer.
    """
    below, found = f"WorkflowId STARTS_WITH {quoted(f'{job_id}/')} AND {OPEN}", {job_id: None, **dict.fromkeys(known)}
    listed = list_executions(temporal, below, rpc_timeout=CALL_TIMEOUT, waits=not found.keys() - {job_id})
    try:
        found |= {one.id: None async for one in listed}
    except RPCError as error:
        if error.status is not RPCStatusCode.RESOURCE_EXHAUSTED or len(found) == 1:
            raise
    return list(found)
