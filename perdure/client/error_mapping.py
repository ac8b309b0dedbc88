"""Maps Temporal's errors to errors that name the job, the cause and the remedy."""

from __future__ import annotations

import difflib
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.errordetails.v1 import QueryFailedFailure
from temporalio.client import WorkflowFailureError, WorkflowQueryFailedError
from temporalio.exceptions import ApplicationError, FailureError
from temporalio.service import RPCError, RPCStatusCode

from perdure.base import shortages
from perdure.base.encryption.codec import REFUSED_PAYLOAD
from perdure.base.errors import (
    ControlPlaneOverloaded,
    ControlPlaneUnreachable,
    JobNotFound,
    JobPaused,
    NotPermitted,
    NoWorker,
    PerdureError,
    Refused,
    WorkflowTaskFails,
)
from perdure.base.executions import ExecutionStatus, QueryRejected, converter_for, describe
from perdure.client import pauses, task_failures
from perdure.client.connection import CALL_TIMEOUT, Connection, unreachable
from perdure.client.results import start_refusal
from perdure.client.views import JobSummary
from perdure.client.visibility import newest_jobs
from perdure.client.workers import pollers
from perdure.contract.names import job_workflow_id

_MOST_JOBS = 100
"""The newest jobs, among which one with a similar name is sought."""
_BUSY = "[TMPRL1101]"
"""Temporal's rule that a worker breaks which computes for more than two seconds, as on a machine that is overloaded."""

_LONGEST_POLL = 65.0
"""Seconds. A worker that lives has begun a poll within this time: the server ends each after a minute."""

_QUERIES_WAIT = "query buffer is full"
"""The server's words for a workflow with as many queries as may wait for a worker: it answers, and no worker does."""


@asynccontextmanager
async def map_errors(connection: Connection, name: str = "", namespace: str | None = None) -> AsyncGenerator[None]:
    """Maps errors that are raised inside.

    Raises:
        JobNotFound: if the server knows no such job.
        NoWorker: if the server answers and no worker does, or one that is too busy.
        WorkflowTaskFails: if a worker answers and cannot continue the job.
        JobPaused: if an operator has paused the job's workflow in Temporal.
        ControlPlaneOverloaded: if the server has no capacity for the call now.
        ControlPlaneUnreachable: if the server does not answer.
        NotPermitted: if the server does not permit the call to this caller.
        Refused: if the server or the job rejects the call.
    """
    try:
        yield
    except WorkflowQueryFailedError as error:
        workflow_id = job_workflow_id(namespace or connection.namespace, name)
        refused = await _start_refusal(connection, workflow_id) if name else None
        failure = f"{name} cannot answer: {await _query_failure(connection, workflow_id, error)}"
        busy = NoWorker(failure, remedy="The worker's machine is very busy. Try again.") if _BUSY in failure else None
        raise refused or busy or Refused(failure) from error
    except QueryRejected as error:
        # It may have been unpaused since.
        silent = await why_silent(connection, name, namespace or connection.namespace)
        raise silent or NoWorker(f"{name} cannot answer: {error}", remedy="Try again.") from error
    except RPCError as error:
        raise await _explanation(connection, name, namespace or connection.namespace, error) from error


async def _explanation(connection: Connection, name: str, namespace: str, error: RPCError) -> PerdureError:
    text = error.message.lower()
    match error.status:
        case RPCStatusCode.NOT_FOUND if name and "namespace" not in text:
            return await _not_found(connection, name, namespace)
        case RPCStatusCode.FAILED_PRECONDITION | RPCStatusCode.DEADLINE_EXCEEDED | RPCStatusCode.CANCELLED:
            if await _answers(connection):
                return await _no_worker(connection, name, namespace)
            return unreachable(connection.endpoint, "no answer in time")
        case RPCStatusCode.RESOURCE_EXHAUSTED if _QUERIES_WAIT in text:
            return await _no_worker(connection, name, namespace)
        case RPCStatusCode.UNAVAILABLE if shortages.is_of_updates(text):
            return _overloaded(connection, error.message)
        case RPCStatusCode.RESOURCE_EXHAUSTED:
            return _overloaded(connection, error.message)
        case RPCStatusCode.UNAVAILABLE | RPCStatusCode.UNKNOWN | RPCStatusCode.INTERNAL:
            return unreachable(
                connection.endpoint, error.message.splitlines()[0] if error.message else str(error.status)
            )
        case RPCStatusCode.PERMISSION_DENIED | RPCStatusCode.UNAUTHENTICATED:
            return NotPermitted(f"the Temporal server refuses: {error.message} ({error.status.name})")
        case _:
            return Refused(f"the Temporal server refuses: {error.message} ({error.status.name})")


def _overloaded(connection: Connection, cause: str) -> ControlPlaneOverloaded:
    """The error of a server that lacks some resource now: it takes the same call later."""
    passing = shortages.is_passing(cause)
    remedy = "Try again." if passing else f"Try again, or {shortages.remedy(cause)}."
    return ControlPlaneOverloaded(
        f"the Temporal server at {connection.endpoint.address} lacks the capacity for this call: {cause}",
        remedy=f"{remedy} Running nodes continue to train.",
    )


async def why_late(connection: Connection, name: str, namespace: str) -> ControlPlaneUnreachable:
    """The error of a job that has not carried out a request in time: `ControlPlaneOverloaded` where a worker runs.

    It has too much to do then, and carries out the same request later.
    """
    try:
        # One call, as a rule: hundreds of machines may ask at once.
        polled = await _polled_lately(connection, "", namespace)
    except RPCError as error:
        return _overloaded(connection, error.message)
    if polled:
        text, remedy = _busy(connection, name, polled)
        return ControlPlaneOverloaded(text, remedy=remedy)
    return await _no_worker(connection, name, namespace)


async def _no_worker(connection: Connection, name: str, namespace: str) -> NoWorker:
    """The error if the server answers and no worker does."""
    if silent := await why_silent(connection, name, namespace):
        return silent
    polled = ""
    with suppress(RPCError):
        polled = await _polled_lately(connection, name, namespace)
    if polled:
        text, remedy = _busy(connection, name, polled)
        return NoWorker(text, remedy=remedy)
    return _absent(connection, name)


def _busy(connection: Connection, name: str, polled: str) -> tuple[str, str]:
    """What a worker means that polls and does not answer, and the remedy."""
    return (
        f"{_no_answer(connection, name)} in time; {polled}: it is busy, or has just ended",
        f"Try again. Running nodes continue to train. Further workers share the work: {_start(connection)}.",
    )


def _absent(connection: Connection, name: str) -> NoWorker:
    return NoWorker(
        f"{_no_answer(connection, name)}: none has polled for a minute",
        remedy=f"Running nodes continue to train without one. Start one: {_start(connection)}. See `perdure doctor`.",
    )


def _no_answer(connection: Connection, name: str) -> str:
    return f"no worker answers for {name or 'jobs'} at {connection.endpoint.address}"


def _start(connection: Connection) -> str:
    return f"perdure worker{' --detach' if connection.endpoint.is_local_default else ''}"


async def _polled_lately(connection: Connection, name: str, namespace: str) -> str:
    """Which worker has polled the job's queue last; empty if it was so long ago that none runs.

    Raises:
        RPCError: if the server does not answer.
    """
    temporal, queue = await connection.connect(), connection.endpoint.task_queue
    if name:
        job = await describe(temporal, job_workflow_id(namespace, name), rpc_timeout=CALL_TIMEOUT)
        queue = job.task_queue
    seen = await pollers(temporal, queue, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW)
    now = time.time()
    worker, last = max(seen.items(), key=lambda poller: poller[1], default=("", 0.0))
    return f"{worker} polled {max(now - last, 0):.0f} s ago" if now - last < _LONGEST_POLL else ""


async def _start_refusal(connection: Connection, workflow_id: str) -> Refused | None:
    """The error if the job never began, because the worker refused what it was started with."""
    temporal = await connection.connect()
    handle = temporal.get_workflow_handle(workflow_id)
    try:
        if (await describe(temporal, workflow_id, rpc_timeout=CALL_TIMEOUT)).status is ExecutionStatus.FAILED:
            await handle.result(rpc_timeout=CALL_TIMEOUT)
    except WorkflowFailureError as error:
        if isinstance(error.cause, ApplicationError) and error.cause.type == REFUSED_PAYLOAD:
            return start_refusal(error.cause)
    except RPCError:
        pass
    return None


async def _query_failure(connection: Connection, workflow_id: str, error: WorkflowQueryFailedError) -> str:
    """The text of a query's failure. Where payloads are encrypted, the SDK's own error does not have it."""
    cause = error.__context__
    for detail in cause.grpc_status.details if isinstance(cause, RPCError) else ():
        failed = QueryFailedFailure()
        if detail.Unpack(failed) and failed.HasField("failure"):
            decoded = await converter_for(await connection.connect(), workflow_id).decode_failure(failed.failure)
            return decoded.message if isinstance(decoded, FailureError) else str(decoded)
    return str(error)


async def why_silent(connection: Connection, name: str, namespace: str) -> NoWorker | None:
    """The error if the server knows why the job does not answer: it is paused, or its workflow task fails."""
    if not name:
        return None
    try:
        temporal = await connection.connect()
        job = await describe(temporal, job_workflow_id(namespace, name), rpc_timeout=CALL_TIMEOUT)
        failure = await task_failures.failure_of(temporal, job)
    except RPCError:
        return None
    if pause := pauses.pause_of(job):
        return JobPaused(f"{name} cannot answer: {pauses.explain(pause)}", remedy=pauses.remedy(pause))
    if failure is None:
        return None
    text = f"{name} cannot answer: {task_failures.explain(failure)}"
    return WorkflowTaskFails(text, remedy=task_failures.remedy(failure))


async def _answers(connection: Connection) -> bool:
    """Whether the server itself is available."""
    temporal = await connection.connect()
    try:
        return await temporal.service_client.check_health(timeout=CALL_TIMEOUT)
    except RPCError:
        return False


async def _not_found(connection: Connection, name: str, namespace: str) -> JobNotFound:
    known: list[JobSummary] = []
    with suppress(RPCError, PerdureError):
        known = [job async for _, job in newest_jobs(await connection.connect(), limit=_MOST_JOBS)]
    here = [job.name for job in known if job.namespace == namespace]
    elsewhere = [job.namespace for job in known if job.name == name]
    if elsewhere:
        remedy = f"There is one in another namespace: add -n {elsewhere[0]}."
    elif nearest := difflib.get_close_matches(name, here, n=3, cutoff=0.5):
        remedy = f"Did you mean {' or '.join(nearest)}?"
    else:
        remedy = "`perdure list -A` shows all jobs."
    return JobNotFound(f'no job named "{name}" in the namespace {namespace}', remedy=remedy)
