"""Workflow executions as the server describes and lists them, whatever their status, and which of them are open.

The SDK's own `describe` and `list_workflows` fail for a status that the SDK does not know yet: with SDK 1.35, one
paused workflow fails every listing that includes it. And a workflow that is not running has not necessarily ended: the
nodes of a job whose workflow an operator has paused continue to train, and must not be deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, TypeVar
from uuid import UUID

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import WorkflowExecutionStatus as WireStatus
from temporalio.api.workflow.v1 import PendingActivityInfo, PendingWorkflowTaskInfo, WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    DescribeWorkflowExecutionResponse,
    ListWorkflowExecutionsRequest,
)
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowHistoryEventFilterType,
    WorkflowQueryRejectedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import TypedSearchAttributes
from temporalio.converter import DataConverter, WorkflowSerializationContext, decode_typed_search_attributes
from temporalio.service import RPCError, RPCStatusCode, ServiceClient

from perdure.base import shortages

OPEN: Final = "CloseTime IS NULL"
"""The visibility query for open executions. `ExecutionStatus = 'Running'` leaves out those that are paused."""

LAST_OF_THEIR_CHAINS: Final = "ExecutionStatus != 'ContinuedAsNew'"
"""The visibility query for executions that did not continue as new."""


def quoted(text: str) -> str:
    """Returns a text as a value of a visibility query. Anybody who may start workflows chooses their IDs."""
    return "'" + text.replace("'", "''") + "'"


_TASK_FAILED = "unexpected workflow task failure"
"""The server's words for an update whose task came to nothing, as does one that would continue as new when the update
arrives: the next run carries out the same update."""
_AGAIN = (0.1, 0.2, 0.4)
"""Seconds before such an update is sent again. A task that fails each time has another cause, and is told."""
_PAGE = 1000
_NAMESAKES = 8
"""The newest workflows of an ID among which an earlier one is looked for: the ID was free for a moment only."""
_AT_ONCE = 16
"""Descriptions requested at a time."""

ResultT = TypeVar("ResultT")


class QueryRejected(Exception):
    """The server did not give the query to the workflow, because of the workflow's status: it is paused."""


class ExecutionStatus(StrEnum):
    """The server's status of one run."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    """An operator has paused the workflow: it handles nothing until it is unpaused."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    TERMINATED = "TERMINATED"
    TIMED_OUT = "TIMED_OUT"
    CONTINUED_AS_NEW = "CONTINUED_AS_NEW"
    """The run has ended and its workflow continues in another one."""
    UNKNOWN = "UNKNOWN"
    """A status of a newer server."""

    @property
    def is_open(self) -> bool:
        """Whether the workflow may still do something. A status that is unknown is no proof of an end."""
        return self not in _CLOSED


_CLOSED = frozenset(
    {
        ExecutionStatus.COMPLETED,
        ExecutionStatus.FAILED,
        ExecutionStatus.CANCELED,
        ExecutionStatus.TERMINATED,
        ExecutionStatus.TIMED_OUT,
    }
)


def status_of(info: WorkflowExecutionInfo) -> ExecutionStatus:
    """The status in a message of the server."""
    try:
        name = WireStatus.Name(info.status)
    except ValueError:
        return ExecutionStatus.UNKNOWN
    # Not every value that the API names is one of these: there is UNSPECIFIED, and later ones will come.
    return ExecutionStatus.__members__.get(name.removeprefix("WORKFLOW_EXECUTION_STATUS_"), ExecutionStatus.UNKNOWN)


@dataclass(frozen=True)
class Execution:
    """One run of a workflow, as visibility lists it."""

    info: WorkflowExecutionInfo

    @property
    def id(self) -> str:
        """The workflow ID."""
        return self.info.execution.workflow_id

    @property
    def run_id(self) -> str:
        return self.info.execution.run_id

    @property
    def status(self) -> ExecutionStatus:
        return status_of(self.info)

    @property
    def is_open(self) -> bool:
        return self.status.is_open

    @property
    def start_time(self) -> datetime:
        return time_of(self.info.start_time)

    @property
    def close_time(self) -> datetime | None:
        return time_of(self.info.close_time) if self.info.HasField("close_time") else None

    @property
    def search_attributes(self) -> TypedSearchAttributes:
        return decode_typed_search_attributes(self.info.search_attributes)


@dataclass(frozen=True)
class ExecutionDescription(Execution):
    """The newest run of a workflow, or a given one, as the server describes it."""

    raw: DescribeWorkflowExecutionResponse

    @property
    def first_run_id(self) -> str:
        """The first run's ID, which is the same for all runs of a workflow that continued as new or was reset."""
        return self.info.first_run_id

    @property
    def began(self) -> datetime:
        """When the first run began."""
        return began_at(self.first_run_id or self.run_id) or self.start_time

    @property
    def task_queue(self) -> str:
        """The queue from which workers take its tasks."""
        return self.info.task_queue

    @property
    def pending_activities(self) -> Iterable[PendingActivityInfo]:
        return self.raw.pending_activities

    @property
    def pending_task(self) -> PendingWorkflowTaskInfo:
        return self.raw.pending_workflow_task


async def describe(
    client: Client, workflow_id: str, *, run_id: str = "", rpc_timeout: timedelta | None = None
) -> ExecutionDescription:
    """Describes a workflow's newest run, or the given one.

    Raises:
        RPCError: if the server does not know it, or does not answer.
    """
    request = DescribeWorkflowExecutionRequest(
        namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id, run_id=run_id)
    )
    answer = await client.workflow_service.describe_workflow_execution(request, retry=True, timeout=rpc_timeout)
    return ExecutionDescription(answer.workflow_execution_info, answer)


async def find(
    client: Client, workflow_id: str, *, run_id: str = "", rpc_timeout: timedelta | None = None
) -> ExecutionDescription | None:
    """Describes as `describe` does; returns None for a workflow that the server does not know."""
    try:
        return await describe(client, workflow_id, run_id=run_id, rpc_timeout=rpc_timeout)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise


async def find_last_run(
    client: Client, workflow_id: str, first_run_id: str, *, rpc_timeout: timedelta | None = None
) -> ExecutionDescription | None:
    """Describes the last run of the workflow that began with this run; None if the server does not know it any more.

    Each run is kept for the retention from its own end on, so a workflow that runs for long loses its first one; and
    its ID may be another workflow's by now.

    Raises:
        RPCError: if the server does not answer.
    """
    newest = await find(client, workflow_id, rpc_timeout=rpc_timeout)
    if newest is not None and newest.first_run_id == first_run_id:
        return newest
    query = f"WorkflowId = {quoted(workflow_id)} AND {LAST_OF_THEIR_CHAINS}"
    listed = list_executions(client, query, limit=_NAMESAKES, rpc_timeout=rpc_timeout)
    for run_id in [execution.run_id async for execution in listed]:
        run = await find(client, workflow_id, run_id=run_id, rpc_timeout=rpc_timeout)
        if run is not None and run.first_run_id == first_run_id:
            return run
    # Lists show a run later than it began.
    following = first_run_id
    while True:
        run = await find(client, workflow_id, run_id=following, rpc_timeout=rpc_timeout)
        if run is None or run.status is not ExecutionStatus.CONTINUED_AS_NEW:
            return run
        following = await _continued_as(client, run, rpc_timeout=rpc_timeout)


async def _continued_as(client: Client, run: Execution, *, rpc_timeout: timedelta | None) -> str:
    """The run as which a run has continued."""
    handle = client.get_workflow_handle(run.id, run_id=run.run_id)
    events = handle.fetch_history_events(
        event_filter_type=WorkflowHistoryEventFilterType.CLOSE_EVENT, rpc_timeout=rpc_timeout
    )
    [last] = [event async for event in events]
    return last.workflow_execution_continued_as_new_event_attributes.new_execution_run_id


async def describe_all(
    client: Client, workflow_ids: Iterable[str], *, rpc_timeout: timedelta | None = None
) -> list[ExecutionDescription]:
    """Describes several workflows; those that the server cannot describe are left out."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(workflow_id: str) -> ExecutionDescription | None:
        async with slots:
            try:
                return await describe(client, workflow_id, rpc_timeout=rpc_timeout)
            except RPCError:
                return None

    found = await asyncio.gather(*(one(workflow_id) for workflow_id in workflow_ids))
    return [description for description in found if description]


async def list_executions(
    client: Client,
    query: str,
    *,
    limit: int | None = None,
    rpc_timeout: timedelta | None = None,
    waits: bool = True,
) -> AsyncGenerator[Execution]:
    """Lists the runs that match a visibility query, the newest first.

    Args:
        client: A client of the namespace.
        query: A list filter; `OPEN` is the part of it that selects open executions.
        limit: The most runs to list; None: all.
        rpc_timeout: The timeout of the request for each page.
        waits: Whether to try again while the server refuses it, which admits few such queries a second.

    Raises:
        RPCError: if the server refuses the query or does not answer.
    """
    page, listed = b"", 0
    while True:
        request = ListWorkflowExecutionsRequest(
            namespace=client.namespace, query=query, page_size=min(_PAGE, limit or _PAGE), next_page_token=page
        )
        answer = await client.workflow_service.list_workflow_executions(request, retry=waits, timeout=rpc_timeout)
        for info in answer.executions:
            yield Execution(info)
            listed += 1
            if listed == limit:
                return
        page = answer.next_page_token
        if not page:
            return


async def query(
    handle: WorkflowHandle[Any, Any],
    name: str,
    *,
    result_type: type[ResultT],
    args: Sequence[Any] = (),
    rpc_timeout: timedelta | None = None,
) -> ResultT:
    """Queries a workflow.

    Raises:
        QueryRejected: if the workflow's status lets it answer no query.
        WorkflowQueryFailedError: if the workflow refuses the query.
        RPCError: if nothing answers.
    """
    try:
        return await handle.query(name, args=args, result_type=result_type, rpc_timeout=rpc_timeout)
    except WorkflowQueryRejectedError as error:
        raise QueryRejected(str(error)) from error
    except ValueError as error:
        # The SDK reports the rejection with the workflow's status, which it does not know.
        if WorkflowExecutionStatus.__name__ not in str(error):
            raise
        raise QueryRejected(str(error)) from error


async def update(
    handle: WorkflowHandle[Any, Any],
    name: str,
    *,
    result_type: type[ResultT],
    args: Sequence[Any],
    update_id: str | None = None,
    rpc_timeout: timedelta | None = None,
) -> ResultT:
    """Updates a workflow, and waits for the result. One run carries out an update of the same ID once only.

    Raises:
        WorkflowUpdateFailedError: if the workflow refuses the update.
        WorkflowUpdateRPCTimeoutOrCancelledError: if nothing answers in time.
        RPCError: if the server refuses the call.
    """
    pauses = iter(_AGAIN)
    while True:
        try:
            return await _update_once(handle, name, args, update_id, result_type, rpc_timeout)
        except RPCError as error:
            pause = next(pauses, None)
            if pause is None or _TASK_FAILED not in error.message:
                raise
        await asyncio.sleep(pause)


async def update_in_crowd(
    client: Client,
    workflow_id: str,
    name: str,
    *,
    result_type: type[ResultT],
    args: Sequence[Any],
    update_id: str,
    rpc_timeout: timedelta,
) -> ResultT:
    """Updates a workflow as `update` does, where hundreds may do so at the same moment.

    The SDK would repeat a refused update within fractions of a second, and each that the server refuses aborts those
    that it has taken. So the caller repeats it after a pause.

    Raises:
        RPCError: if the server has no room for the update now, too.
    """
    handle = client.get_workflow_handle(workflow_id)
    once = _without_retries(client).get_workflow_handle(workflow_id)
    try:
        return await _update_once(once, name, args, update_id, result_type, rpc_timeout)
    except RPCError as error:
        if shortages.is_of_updates(error.message):
            raise
    return await update(handle, name, args=args, update_id=update_id, result_type=result_type, rpc_timeout=rpc_timeout)


async def _update_once(
    handle: WorkflowHandle[Any, Any],
    name: str,
    args: Sequence[Any],
    update_id: str | None,
    result_type: type[ResultT],
    rpc_timeout: timedelta | None,
) -> ResultT:
    try:
        return await handle.execute_update(
            name, args=args, id=update_id, result_type=result_type, rpc_timeout=rpc_timeout
        )
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        # The SDK reports a cancellation as an error, too; a task that takes it for an answer does not end.
        if isinstance(error.__cause__, asyncio.CancelledError):
            raise error.__cause__ from None
        raise


def _without_retries(client: Client) -> Client:
    """The same client, whose calls are sent once each."""
    config = client.config(active_config=True)
    config["service_client"] = _SendsOnce(config["service_client"])
    return Client(**config)


class _SendsOnce(ServiceClient):
    """A connection whose calls the SDK does not repeat, on top of another one."""

    def __init__(self, connection: ServiceClient) -> None:
        super().__init__(connection.config)
        self._connection = connection

    @property
    def worker_service_client(self) -> Any:
        return self._connection.worker_service_client

    def update_rpc_metadata(self, metadata: Mapping[str, str | bytes]) -> None:
        self._connection.update_rpc_metadata(metadata)

    def update_api_key(self, api_key: str | None) -> None:
        self._connection.update_api_key(api_key)

    async def _rpc_call(self, *args: Any, **named: Any) -> Any:
        return await self._connection._rpc_call(*args, **(named | {"retry": False}))


def converter_for(client: Client, workflow_id: str) -> DataConverter:
    """The converter for payloads of one workflow that were read from the server itself."""
    context = WorkflowSerializationContext(namespace=client.namespace, workflow_id=workflow_id)
    return client.data_converter.with_context(context)


def began_at(run_id: str) -> datetime | None:
    """The time at which a run began, by its ID; None for an ID that has none."""
    try:
        known = UUID(run_id)
        # The server makes IDs of version 7, which begin with the milliseconds since 1970.
        return datetime.fromtimestamp((known.int >> 80) / 1000, UTC) if known.version == 7 else None
    except ValueError:
        return None


def time_of(stamp: Timestamp) -> datetime:
    """A time in a message of the server."""
    return stamp.ToDatetime(UTC)
