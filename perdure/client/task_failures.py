"""Workflow tasks that fail: the server hands such a task out again and again, and the job decides nothing meanwhile.

A worker whose code cannot replay a run fails its task. Temporal records the first failure, and only the number of
further attempts; a task in that state answers no query, as if there were no worker.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from datetime import UTC, datetime

from temporalio.api.common.v1 import WorkflowExecution as Execution
from temporalio.api.enums.v1 import EventType, WorkflowTaskFailedCause
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryReverseRequest
from temporalio.client import Client as TemporalClient
from temporalio.converter import DataConverter
from temporalio.exceptions import FailureError
from temporalio.service import RPCError

from perdure.base.executions import OPEN, ExecutionDescription, converter_for, describe_all, list_executions, time_of
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.views import TaskFailure
from perdure.contract.names import NODE_GROUP, TRAINING_JOB

_RECENT_EVENTS = 20
"""The failure is among this many of the last events: until the task succeeds, only signals are recorded after it."""

_SILENT_ATTEMPTS = 3
"""Attempts that time out before they count as a failure: the first two may be caused by a worker that ended."""

_LONGEST_CAUSE = 300

_SETTLED = (EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED)
_NONDETERMINISM = WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_NON_DETERMINISTIC_ERROR


async def failure_of(temporal: TemporalClient, workflow: ExecutionDescription) -> TaskFailure | None:
    """Why the task of a described workflow fails; None if it does not, or if the workflow has ended.

    Raises:
        RPCError: if the server does not answer.
    """
    pending = workflow.pending_task
    if not workflow.is_open or pending.attempt < 2:
        return None
    request = GetWorkflowExecutionHistoryReverseRequest(
        namespace=temporal.namespace,
        execution=Execution(workflow_id=workflow.id, run_id=workflow.run_id),
        maximum_page_size=_RECENT_EVENTS,
    )
    answer = await temporal.workflow_service.get_workflow_execution_history_reverse(request, timeout=CALL_TIMEOUT)
    event = _failure_among(list(answer.history.events))
    if event is None and pending.attempt < _SILENT_ATTEMPTS:
        return None
    since = time_of(pending.original_scheduled_time)
    known = TaskFailure(workflow_id=workflow.id, attempt=pending.attempt, since=since)
    if event is None:
        return known
    failed = event.workflow_task_failed_event_attributes
    text = await text_of(converter_for(temporal, workflow.id), failed.failure)
    return known.model_copy(
        update={
            "cause": text[:_LONGEST_CAUSE],
            "nondeterminism": failed.cause == _NONDETERMINISM,
            "worker": failed.identity,
            "since": min(since, time_of(event.event_time)),
        }
    )


async def text_of(converter: DataConverter, failure: Failure) -> str:
    """The failure's message and those of its causes, which are encrypted where payloads are."""
    copy = Failure()
    copy.CopyFrom(failure)
    error: BaseException | None = await converter.decode_failure(copy)
    texts: list[str] = []
    while error is not None:
        texts.append((error.message if isinstance(error, FailureError) else str(error)).partition("\n")[0])
        error = error.__cause__
    return ": ".join(texts)


def _failure_among(newest_first: list[HistoryEvent]) -> HistoryEvent | None:
    for event in newest_first:
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED:
            return event
        if event.event_type in _SETTLED:
            return None
    return None


async def failures_among(temporal: TemporalClient, workflow_ids: list[str]) -> dict[str, TaskFailure]:
    """The failures of those of some workflows whose tasks fail, by ID; workflows that the server cannot describe are
    left out."""
    return await failures_of(temporal, await describe_all(temporal, workflow_ids, rpc_timeout=CALL_TIMEOUT))


async def failures_of(temporal: TemporalClient, workflows: Iterable[ExecutionDescription]) -> dict[str, TaskFailure]:
    """The failures of those of some described workflows whose tasks fail, by ID."""
    found: dict[str, TaskFailure] = {}
    for workflow in workflows:
        with suppress(RPCError):
            if failure := await failure_of(temporal, workflow):
                found[workflow.id] = failure
    return found


async def open_workflows(temporal: TemporalClient, *, limit: int) -> AsyncGenerator[str]:
    """The IDs of open jobs and groups, the newest first."""
    query = f"WorkflowType IN ('{TRAINING_JOB}', '{NODE_GROUP}') AND {OPEN}"
    async for execution in list_executions(temporal, query, limit=limit, rpc_timeout=CALL_TIMEOUT):
        yield execution.id


def explain(failure: TaskFailure, *, now: datetime | None = None) -> str:
    """Describes the failure in a sentence that names the cause."""
    seconds = max(0, round(((now or datetime.now(UTC)) - failure.since).total_seconds()))
    cause = failure.cause or "no attempt has finished; see the worker's log"
    by = f" by {failure.worker}" if failure.worker else ""
    return f"its workflow task fails{by}, attempt {failure.attempt} in {seconds} s: {cause}"


def remedy(failure: TaskFailure) -> str:
    """The advice to the user."""
    if failure.nondeterminism:
        return (
            "The worker's code differs from the code that began this run: start a worker of that release or a newer "
            "one. The task is retried automatically; running nodes continue to train."
        )
    if re.search("search ?attribute", failure.cause, re.IGNORECASE):
        return (
            "A worker that may add search attributes does so within a minute; otherwise ask an administrator of the "
            "namespace: `perdure doctor` names the command. Then the task is retried; running nodes continue to train."
        )
    return "The task is retried automatically, and another worker may take it; running nodes continue to train."
