"""A joining machine's connection to its job. Machines that reach Temporal use it themselves; the gateway uses it for
others."""

from __future__ import annotations

import contextlib
from typing import Protocol
from uuid import uuid4

from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.activities.nodes.joined.node_session import AgentConnection
from perdure.agent.job_liveness import JobLiveness, query_job_liveness
from perdure.base.errors import ControlPlaneOverloaded, ExitCode, JobAlreadyRunning, JobNotFound, JoinRefused
from perdure.base.executions import find, find_last_run, update_in_crowd
from perdure.client.client import Client
from perdure.client.connection import CALL_TIMEOUT, payload_encryption
from perdure.client.error_mapping import map_errors, why_late
from perdure.client.job_calls import UPDATE_TIMEOUT
from perdure.client.results import await_result
from perdure.client.views import FINAL_PHASES
from perdure.contract import (
    Incarnation,
    JobPhase,
    JobResult,
    JoinAnswer,
    JoinRefusal,
    JoinRequest,
    LossCause,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeRequest,
    identity_of,
)
from perdure.contract.base import Time
from perdure.contract.names import job_workflow_id
from perdure.spec.job import JobSpec


class JobConnection(Protocol):
    """What a joining machine needs of the control plane. Every method raises `ControlPlaneUnreachable` if there is no
    answer."""

    session: str
    """Identifies this process in its requests."""

    async def start(self, spec: JobSpec) -> bool:
        """Starts the job; returns False if it was started before."""
        ...

    async def request_place(self, request: JoinRequest) -> JoinAnswer | JobResult:
        """Requests a place once; returns the job's result if it has ended.

        Raises:
            JoinRefused: if the job refuses.
            JobNotFound: if there is no such job.
        """
        ...

    async def wait(self) -> JobResult:
        """Waits for the job to end."""
        ...

    async def result(self, place: NodeRequest) -> JobResult | None:
        """The result of the job that gave the place, if it has ended or is ending; None if it continues."""
        ...

    async def report_departure(
        self, place: NodeRequest, *, time: Time, reason: str, cause: LossCause = LossCause.UNKNOWN
    ) -> None:
        """Reports to the group what a backend's watch would report: that no process of the node runs any more."""
        ...

    def agent_connection(self) -> AgentConnection:
        """How the agent of the last place reaches the control plane."""
        ...


class DirectJobConnection:
    """The connection of one that reaches Temporal."""

    def __init__(self, client: Client, job: str, namespace: str) -> None:
        self.session = uuid4().hex
        self._client = client
        self._job = job
        self._namespace = namespace
        self._requests = uuid4().hex
        self._answered = 0

    async def start(self, spec: JobSpec) -> bool:
        # Of many machines that try at once, one succeeds.
        with contextlib.suppress(JobAlreadyRunning):
            await self._client.submit(spec, again=False)
            return True
        return False

    async def request_place(self, request: JoinRequest) -> JoinAnswer | JobResult:
        temporal = await self._client.connect()
        try:
            async with map_errors(self._client, self._job, self._namespace):
                # A request that is repeated because its answer is late is the same update: it is carried out once, and
                # is one of the ten that the server takes at a time.
                key = f"{self._requests}-{request.session}-{request.stay}-{self._answered}"
                answer = await update_in_crowd(
                    temporal,
                    job_workflow_id(self._namespace, self._job),
                    "join",
                    args=[request],
                    result_type=JoinAnswer,
                    update_id=key,
                    rpc_timeout=UPDATE_TIMEOUT,
                )
            self._answered += 1
            return answer
        except JobNotFound as error:
            # An update of a job that has ended is not found either, nor one that the server has lost.
            async with map_errors(self._client, self._job, self._namespace):
                found = await find(temporal, job_workflow_id(self._namespace, self._job), rpc_timeout=CALL_TIMEOUT)
            if found is not None and found.is_open:
                raise ControlPlaneOverloaded(
                    f"the Temporal server has lost a request to {self._job}, which runs", remedy="Try again."
                ) from error
            await self._client.describe(self._job, namespace=self._namespace)
            return await self.wait()
        except WorkflowUpdateFailedError as error:
            self._answered += 1
            cause = error.cause
            kind = cause.type or "" if isinstance(cause, ApplicationError) else ""
            raise join_refused(
                self._job, kind, cause.message if isinstance(cause, ApplicationError) else str(cause)
            ) from error
        except WorkflowUpdateRPCTimeoutOrCancelledError as error:
            raise await why_late(self._client, self._job, self._namespace) from error

    async def wait(self) -> JobResult:
        return await self._client.wait(self._job, namespace=self._namespace)

    async def result(self, place: NodeRequest) -> JobResult | None:
        return await self.result_of_run(place.job_first_run_id)

    async def result_of_run(self, first_run_id: str) -> JobResult | None:
        """The result of the job with this first run ID, if it has ended or is ending; None if it continues."""
        temporal = await self._client.connect()
        job_id = job_workflow_id(self._namespace, self._job)
        async with map_errors(self._client, self._job, self._namespace):
            liveness = await query_job_liveness(
                temporal, job_id=job_id, first_run_id=first_run_id, rpc_timeout=CALL_TIMEOUT
            )
            if liveness is JobLiveness.OPEN:
                phase = (await self._client.status(self._job, namespace=self._namespace)).phase
                return await self.wait() if phase is JobPhase.STOPPING or phase in FINAL_PHASES else None
            last = await find_last_run(temporal, job_id, first_run_id, rpc_timeout=CALL_TIMEOUT)
            run_id = first_run_id if last is None else last.run_id
            handle = temporal.get_workflow_handle(job_id, run_id=run_id, result_type=JobResult)
            return await await_result(temporal, handle, rpc_timeout=CALL_TIMEOUT)

    async def report_departure(
        self, place: NodeRequest, *, time: Time, reason: str, cause: LossCause = LossCause.UNKNOWN
    ) -> None:
        await self.report_gone(place.group_id, place.node, time=time, reason=reason, cause=cause)

    async def report_gone(self, group: str, node: Incarnation, *, time: Time, reason: str, cause: LossCause) -> None:
        """Sends a group the departure of one of its nodes; a group that is over needs none."""
        gone = NodeEvent(**identity_of(node), kind=NodeEventKind.GONE, time=time, reason=reason, cause=cause)
        temporal = await self._client.connect()
        async with map_errors(self._client):
            try:
                await temporal.get_workflow_handle(group).signal(
                    "node_events", NodeEvents(events=(gone,)), rpc_timeout=CALL_TIMEOUT
                )
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise

    def agent_connection(self) -> AgentConnection:
        endpoint = self._client.endpoint
        return AgentConnection(
            environment={
                "TEMPORAL_ADDRESS": endpoint.address,
                "TEMPORAL_NAMESPACE": endpoint.namespace,
                **payload_encryption(endpoint).environment,
            }
        )


def join_refused(job: str, kind: str, text: str) -> JoinRefused:
    """The error of a machine that the job refuses."""
    usage = kind in (
        JoinRefusal.OTHER_COMMAND,
        JoinRefusal.OTHER_BACKEND,
        JoinRefusal.UNKNOWN_ROLE,
        JoinRefusal.TICKET,
    )
    return JoinRefused(
        f"{job} refuses: {text}",
        kind=kind,
        exit_code=ExitCode.USAGE if usage else ExitCode.INFRASTRUCTURE,
        remedy=_REMEDIES.get(kind, ""),
    )


_REMEDIES: dict[str, str] = {
    JoinRefusal.NO_PLACE: "With --wait this machine stays ready until there is one; `perdure scale` makes more.",
    JoinRefusal.OTHER_COMMAND: "Leave the command out, or join a job of another name.",
    JoinRefusal.DISPLACED: "Give machines that run at the same time different --node-id.",
    JoinRefusal.TICKET: "`perdure ticket NAME` makes another one, where Temporal is reachable.",
}
