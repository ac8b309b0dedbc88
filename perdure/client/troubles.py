"""What keeps a job waiting that only the server knows: pauses, activities and workflow tasks that fail.

A namespace may list its workflows a few times a second only (10, by default). So the workflows of a job are listed once
for all of these, and where that is refused, those that are known by their IDs do.
"""

from __future__ import annotations

from temporalio.client import Client as TemporalClient

from perdure.base.executions import describe_all
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.failing_activities import failing_of
from perdure.client.pauses import pauses_of
from perdure.client.task_failures import failures_of
from perdure.client.views import FailingActivity, Pause, TaskFailure
from perdure.client.visibility import open_workflows_of
from perdure.contract import JobStatus
from perdure.contract.names import archiver_workflow_id, job_workflow_id, store_workflow_id


async def troubles_of(
    temporal: TemporalClient, status: JobStatus
) -> tuple[tuple[Pause, ...], tuple[TaskFailure, ...], tuple[FailingActivity, ...]]:
    """Asks the server about a job and everything that belongs to it.

    Raises:
        RPCError: if the server does not answer.
    """
    job_id = job_workflow_id(status.namespace, status.name)
    known = (job_id, *status.groups, store_workflow_id(job_id, status.uid), archiver_workflow_id(job_id, status.uid))
    workflows = await open_workflows_of(temporal, job_id, known=known)
    described = [one for one in await describe_all(temporal, workflows, rpc_timeout=CALL_TIMEOUT) if one.is_open]
    failures = await failures_of(temporal, [one for one in described if one.id in (job_id, *status.groups)])
    pauses = tuple(pause for one in described for pause in pauses_of(one))
    failing = tuple([activity for one in described for activity in await failing_of(temporal, one)])
    return pauses, tuple(failures.values()), failing
