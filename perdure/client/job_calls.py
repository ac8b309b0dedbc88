"""Queries and updates of the workflow of a job, with errors that tell people what to do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from temporalio.client import WorkflowHandle, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError

from perdure.base.errors import NoWorker, Refused
from perdure.base.executions import ExecutionDescription, describe, query
from perdure.client.connection import CALL_TIMEOUT, Connection
from perdure.client.error_mapping import map_errors, why_silent
from perdure.contract import JobResult
from perdure.contract.names import job_workflow_id

UPDATE_TIMEOUT = timedelta(seconds=10)
"""The time that a job has to answer a request; it decides in milliseconds, but a worker may be just starting."""

ResultT = TypeVar("ResultT")


class JobCalls(Connection):
    """A connection that asks jobs by their name."""

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

    async def _update(
        self, name: str, namespace: str | None, update: str, request: Any, kind: type[ResultT]
    ) -> ResultT:
        async with map_errors(self, name, namespace):
            handle = await self._handle(name, namespace)
            try:
                return await handle.execute_update(  # pyright: ignore[reportUnknownMemberType]
                    update, request, result_type=kind, rpc_timeout=UPDATE_TIMEOUT
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
