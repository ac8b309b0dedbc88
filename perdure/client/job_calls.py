"""Queries and updates of the workflow of a job, with errors that tell people what to do."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.client import WorkflowHandle, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.errors import NoWorker, Refused
from perdure.base.executions import ExecutionDescription, describe, query, update
from perdure.client.connection import CALL_TIMEOUT, Connection
from perdure.client.datasets import read_datasets
from perdure.client.error_mapping import map_errors, why_silent
from perdure.client.failing_activities import failing_below
from perdure.client.history_news import history_news
from perdure.client.nodes import refresh_nodes
from perdure.client.pauses import pause_of, pauses_below
from perdure.client.troubles import troubles_of
from perdure.client.views import FailingActivity, JobSummary, Pause, TaskFailure
from perdure.client.visibility import summary_of
from perdure.contract import (
    Accepted,
    ArchiveReport,
    DatasetView,
    HistoryAnswer,
    HistoryRequest,
    JobResult,
    JobStatus,
    NodeView,
    RelaunchRequest,
    ScaleRequest,
)
from perdure.contract.names import archiver_workflow_id, job_workflow_id

UPDATE_TIMEOUT = timedelta(seconds=10)
"""The time that a job has to answer a request; it decides in milliseconds, but a worker may be just starting."""

ResultT = TypeVar("ResultT")


class JobCalls(Connection):
    """A connection that asks jobs by their name."""

    async def pauses(self, name: str, *, namespace: str | None = None) -> tuple[Pause, ...]:
        """What an operator has paused in Temporal of the job, its groups, its datasets and its store: whole workflows
        and activities, such as leases. Needs no worker."""
        async with map_errors(self, name, namespace):
            return await pauses_below(await self.connect(), job_workflow_id(namespace or self.namespace, name))

    async def failing_activities(self, name: str, *, namespace: str | None = None) -> tuple[FailingActivity, ...]:
        """What the job, its groups, its datasets and its store try repeatedly without success, such as the deletion of
        nodes of a cluster that is gone. Needs no worker."""
        async with map_errors(self, name, namespace):
            return await failing_below(await self.connect(), job_workflow_id(namespace or self.namespace, name))

    async def troubles(
        self, status: JobStatus
    ) -> tuple[tuple[Pause, ...], tuple[TaskFailure, ...], tuple[FailingActivity, ...]]:
        """What `pauses`, `task_failures` and `failing_activities` return, read together: servers list workflows a few
        times a second only. Needs no worker."""
        async with map_errors(self, status.name, status.namespace):
            return await troubles_of(await self.connect(), status)

    async def describe(self, name: str, *, namespace: str | None = None) -> JobSummary:
        """The server's own information about the job, which needs no worker."""
        async with map_errors(self, name, namespace):
            found = await self._described(name, namespace)
        summary = summary_of(found)
        if summary is None:
            raise Refused(f"{found.id} is not a job of Perdure")
        return summary.model_copy(update={"pause": pause_of(found)})

    async def datasets(self, status: JobStatus) -> Mapping[str, DatasetView]:
        """The datasets that the ranks of a job read, by their names: what is done, leased and set aside."""
        async with map_errors(self, status.name, status.namespace):
            job_id = job_workflow_id(status.namespace, status.name)
            return await read_datasets(await self.connect(), job_id, status.uid)

    async def archive(self, status: JobStatus) -> ArchiveReport:
        """Whether the archive of a job could be written; empty where it has none."""
        handle = (await self.connect()).get_workflow_handle(
            archiver_workflow_id(job_workflow_id(status.namespace, status.name), status.uid)
        )
        async with map_errors(self, status.name, status.namespace):
            try:
                return await query(handle, "report", result_type=ArchiveReport, rpc_timeout=CALL_TIMEOUT)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return ArchiveReport()
                raise

    async def news(self, name: str, *, namespace: str | None = None) -> AsyncGenerator[None]:
        """Yields at once whenever something happens to the job, and for what has happened before, until the job has
        ended. Costs nothing meanwhile, and needs no worker. Steps are no events.

        Raises:
            JobNotFound: if there is no such job.
        """
        async with map_errors(self, name, namespace):
            job_id = job_workflow_id(namespace or self.namespace, name)
            async for _ in history_news(await self.connect(), job_id):
                yield

    async def refreshed(self, nodes: Sequence[NodeView], groups: Iterable[str]) -> tuple[NodeView, ...]:
        """These nodes with their agents' latest reports, which are read from the server alone.

        Args:
            nodes: Nodes of one role, as the job has told of them.
            groups: The workflows of their groups.
        """
        return await refresh_nodes(await self.connect(), nodes, groups)

    async def history(self, request: HistoryRequest | None = None) -> HistoryAnswer:
        """Answers a question about jobs of the past, also of those that Temporal has forgotten.

        Args:
            request: Which jobs; by default the newest ones of all namespaces that the worker serves.

        Raises:
            NoWorker: if no worker that keeps a history answers.
            Refused: if the history has no job of the name that others are to be like, or its database does not answer.
        """
        from perdure.client.history import read_history

        return await read_history(self, request or HistoryRequest())

    async def _handle(self, name: str, namespace: str | None) -> WorkflowHandle[Any, JobResult]:
        temporal = await self.connect()
        return temporal.get_workflow_handle(job_workflow_id(namespace or self.namespace, name), result_type=JobResult)

    async def _described(self, name: str, namespace: str | None) -> ExecutionDescription:
        job_id = job_workflow_id(namespace or self.namespace, name)
        return await describe(await self.connect(), job_id, rpc_timeout=CALL_TIMEOUT)

    async def _query(
        self, name: str, namespace: str | None, asked: str, kind: type[ResultT], *arguments: Any
    ) -> ResultT:
        async with map_errors(self, name, namespace):
            handle = await self._handle(name, namespace)
            return await query(handle, asked, args=arguments, result_type=kind, rpc_timeout=CALL_TIMEOUT)

    async def change(
        self,
        name: str,
        request: ScaleRequest | RelaunchRequest,
        *,
        namespace: str | None = None,
        key: str | None = None,
    ) -> Accepted:
        """Requests one of the changes that `scale` and `relaunch_node` make, with all that their requests can say.

        Args:
            name: The job.
            request: The change.
            namespace: The job's namespace; by default the client's.
            key: A name of this request, with which it is carried out once, however often it is sent.

        Raises:
            Refused: if the job does not accept that.
        """
        asked = "scale" if isinstance(request, ScaleRequest) else "relaunch_node"
        return await self._update(name, namespace, asked, request, Accepted, key)

    async def _update(
        self, name: str, namespace: str | None, asked: str, request: Any, kind: type[ResultT], key: str | None = None
    ) -> ResultT:
        async with map_errors(self, name, namespace):
            handle = await self._handle(name, namespace)
            try:
                return await update(
                    handle, asked, args=[request], result_type=kind, update_id=key, rpc_timeout=UPDATE_TIMEOUT
                )
            except WorkflowUpdateFailedError as error:
                reason = error.cause.message if isinstance(error.cause, ApplicationError) else str(error.cause)
                raise Refused(f"{name} refuses: {reason}") from error
            except WorkflowUpdateRPCTimeoutOrCancelledError as error:
                silent = await why_silent(self, name, namespace or self.namespace)
                raise silent or NoWorker(
                    f"{name} did not answer within {UPDATE_TIMEOUT.total_seconds():.0f} s; no worker seems to run",
                    remedy="It may still accept the request when one starts: `perdure doctor`, then check its status.",
                ) from error
