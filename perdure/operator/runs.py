"""The operator's requests to Temporal, and their cost.

One query to the server's visibility finds all jobs that have changed. Only a job that has changed, or that was not
reconciled for a while, is queried itself: one call for its execution, a query, and one call for each group of 128
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryRequest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from perdure.agent.job_liveness import has_groups
from perdure.base.errors import ExitCode, PerdureError, Refused
from perdure.base.executions import (
    ExecutionDescription,
    describe_all,
    find,
    find_last_run,
)
from perdure.base.payloads import first_value, memo_value
from perdure.client.client import Client
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.error_mapping import map_errors
from perdure.client.leases import leases_of
from perdure.client.results import result_of
from perdure.client.views import Submission, comparable, training_step
from perdure.contract import JobPhase, JobResult, JobStatus
from perdure.contract.names import role_of_group, uid_of
from perdure.contract.users import OBJECT_MEMO
from perdure.operator.resource import TrainingJobResource
from perdure.operator.status import KnownStep
from perdure.spec.accepted import read_accepted
from perdure.spec.job import JobSpec

EVERY_JOB = 100_000
"""A limit above the number of jobs that a Temporal namespace is expected to hold."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The latest run of a job's name."""

    workflow_id: str
    run_id: str
    """The run ID of the chain's newest run."""
    first_run_id: str
    object_uid: str
    """The UID of the object that it was started for; empty if it was started without one."""
    open: bool
    page: str
    """The job's page in the Temporal UI; empty if its address is unknown."""

    @property
    def continued(self) -> bool:
        """Whether the job has continued as new: the newest run has the specification that the job has completed."""
        return self.run_id != self.first_run_id


class Runs:
    """The workflows of the objects."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def find(self, resource: TrainingJobResource) -> Run | None:
        """Finds the latest run of the object's name, however it was started."""
        temporal = await self._client.connect()
        async with map_errors(self._client):
            found = await find(temporal, resource.workflow_id, rpc_timeout=CALL_TIMEOUT)
            return None if found is None else await self._run(temporal, found)

    async def find_ended(self, resource: TrainingJobResource) -> Run | None:
        """Finds the object's own run where another job has its name: it has ended, as a name has one open run. None
        where the server does not know it any more."""
        temporal = await self._client.connect()
        async with map_errors(self._client):
            found = await find_last_run(
                temporal, resource.workflow_id, resource.status.run_id, rpc_timeout=CALL_TIMEOUT
            )
            return None if found is None else replace(await self._run(temporal, found), open=False)

    async def _run(self, temporal: TemporalClient, found: ExecutionDescription) -> Run:
        return Run(
            workflow_id=found.id,
            run_id=found.run_id,
            first_run_id=found.first_run_id,
            object_uid=await memo_value(temporal, found, OBJECT_MEMO) or "",
            open=found.is_open,
            page=self._client.endpoint.workflow_page(found.id, found.first_run_id),
        )

    async def start(self, job: JobSpec, resource: TrainingJobResource, *, owner: str = "") -> Submission:
        """Starts the job, and stores the object's UID in the run.

        Args:
            job: The job.
            resource: Its object.
            owner: The user whom lists of jobs show; by default the operator's own.

        Raises:
            JobAlreadyRunning: if a job of that name runs.
        """
        return await self._client.submit(job, upload=False, memo={OBJECT_MEMO: resource.metadata.uid}, owner=owner)

    async def spec_of(self, run: Run) -> JobSpec:
        """The specification that the newest run was started with."""
        temporal = await self._client.connect()
        request = GetWorkflowExecutionHistoryRequest(
            namespace=temporal.namespace,
            execution=WorkflowExecution(workflow_id=run.workflow_id, run_id=run.run_id),
            maximum_page_size=1,
        )
        async with map_errors(self._client):
            answer = await temporal.workflow_service.get_workflow_execution_history(request, timeout=CALL_TIMEOUT)
        started = answer.history.events[0].workflow_execution_started_event_attributes
        return read_accepted(await first_value(temporal, run.workflow_id, started.input.payloads))

    async def status(self, resource: TrainingJobResource) -> JobStatus:
        """The job's status.

        Raises:
            NoWorker: if no worker answers for it.
        """
        return await self._client.status(resource.metadata.name, namespace=resource.metadata.namespace)

    async def leading_role(self, resource: TrainingJobResource, job: JobStatus) -> JobStatus:
        """The same status, about the object's leading role.

        Raises:
            NoWorker: if no worker answers for it.
        """
        role = resource.leading_role
        if role in (None, job.role):
            return job
        return await self._client.status(resource.metadata.name, namespace=resource.metadata.namespace, role=role)

    async def step(self, job: JobStatus) -> KnownStep | None:
        """The step of the slowest member of the role's world; None if it is not known."""
        temporal = await self._client.connect()
        own = [group for group in job.groups if role_of_group(group) == job.role]
        groups = await describe_all(temporal, own, rpc_timeout=CALL_TIMEOUT)
        leases = [lease for group in groups for lease in await leases_of(temporal, group)]
        views = [lease.view for lease in leases if lease.view and lease.view.generation == job.generation]
        known = [view.progress for view in views if view.progress]
        progress = min(comparable(known), key=lambda progress: progress.step, default=job.progress)
        if progress is None:
            return None
        return KnownStep(training_step(progress, job.checkpoint), generation=progress.generation)

    async def result(self, resource: TrainingJobResource, run: Run) -> tuple[JobResult, JobStatus | None]:
        """The result of a run that has ended, and its last status if a worker answers for it."""
        name, namespace = resource.metadata.name, resource.metadata.namespace
        temporal = await self._client.connect()
        # By its ID: another job may have the name by now.
        handle: WorkflowHandle[Any, JobResult] = temporal.get_workflow_handle(
            run.workflow_id, run_id=run.run_id, result_type=JobResult
        )
        try:
            async with map_errors(self._client, name, namespace):
                try:
                    result = await handle.result(rpc_timeout=CALL_TIMEOUT)
                except WorkflowFailureError as error:
                    result = await result_of(temporal, error, handle)
        except Refused as error:
            return _never_began(str(error)), None
        try:
            status = await self._client.status(name, namespace=namespace, role=resource.leading_role)
        except PerdureError:
            return result, None
        return result, status if status.uid == uid_of(run.first_run_id) else None

    async def scale(
        self, resource: TrainingJobResource, role: str, nodes: str, scaling: dict[str, Any] | None = None
    ) -> None:
        """Changes the number of nodes of a role, unless `nodes` is empty, and its `scaling`, if one is given."""
        name, namespace, reason = (
            resource.metadata.name,
            resource.metadata.namespace,
            "the TrainingJob object was changed",
        )
        await self._client.scale(name, nodes, scaling=scaling, role=role, namespace=namespace, reason=reason)

    async def suspend(self, resource: TrainingJobResource, *, suspended: bool, role: str | None = None) -> None:
        """Makes the job, or one role of several, release its nodes, or request them again."""
        name, namespace = resource.metadata.name, resource.metadata.namespace
        change = self._client.suspend if suspended else self._client.resume
        await change(name, namespace=namespace, role=role, reason="the TrainingJob object was changed")

    async def cancel(self, run: Run) -> None:
        """Cancels this run, and no later one of its name; may be repeated."""
        temporal = await self._client.connect()
        handle: WorkflowHandle[Any, Any] = temporal.get_workflow_handle(
            run.workflow_id, first_execution_run_id=run.first_run_id
        )
        async with map_errors(self._client):
            try:
                await handle.cancel(rpc_timeout=CALL_TIMEOUT)
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise

    async def has_nodes(self, run: Run) -> bool:
        """Whether groups of the run still wind down: those of a terminated run do that by themselves."""
        temporal = await self._client.connect()
        async with map_errors(self._client):
            return await has_groups(temporal, run.workflow_id, uid_of(run.first_run_id), rpc_timeout=CALL_TIMEOUT)

    async def edges(self) -> Mapping[str, object]:
        """A value for every running job, by workflow ID, that differs after something has happened to the job."""
        jobs = await self._client.list(everywhere=True, running=True, limit=EVERY_JOB)
        return {job.workflow_id: (job.run_id, job.phase, job.world_size, job.restarts) for job in jobs}


def _never_began(reason: str) -> JobResult:
    """The result of a job whose specification the worker refused although the operator did not, because their releases
    differ."""
    now = datetime.now(UTC)
    return JobResult(
        phase=JobPhase.FAILED,
        exit_code=ExitCode.USAGE,
        reason=reason,
        generations=0,
        restarts=0,
        started_at=now,
        finished_at=now,
    )
