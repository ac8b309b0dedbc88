"""The result of a job, however its workflow ended: by itself, cancelled, terminated from Temporal, or timed out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError, TerminatedError, TimeoutError
from temporalio.service import RPCError

from perdure.base.encryption.codec import REFUSED_PAYLOAD, UNREADABLE_JSON
from perdure.base.errors import ExitCode, Refused
from perdure.base.executions import ExecutionStatus, QueryRejected, describe, find, query
from perdure.client.connection import CALL_TIMEOUT
from perdure.contract import JobPhase, JobResult, JobStatus


async def await_result(
    temporal: TemporalClient, handle: WorkflowHandle[Any, JobResult], *, rpc_timeout: timedelta
) -> JobResult:
    """Waits for the end of a job, in whichever run that is: also in that after a reset, which terminates the one
    before.

    Raises:
        Refused: as `result_of`.
        RPCError: if the server does not know the job, or the job does not end in time.
    """
    first_run = (await describe(temporal, handle.id, run_id=handle.run_id or "", rpc_timeout=CALL_TIMEOUT)).first_run_id
    while True:
        try:
            return await handle.result(rpc_timeout=rpc_timeout)
        except WorkflowFailureError as error:
            if not isinstance(error.cause, TerminatedError) or not await _goes_on(temporal, handle.id, first_run):
                return await result_of(temporal, error, handle)
            handle = temporal.get_workflow_handle(handle.id, result_type=JobResult)


async def _goes_on(temporal: TemporalClient, workflow_id: str, first_run: str) -> bool:
    """Whether a job of which a run was terminated runs again, or has ended otherwise since: it was reset."""
    newest = await find(temporal, workflow_id, rpc_timeout=CALL_TIMEOUT)
    if newest is None or newest.first_run_id != first_run:
        return False
    return newest.status is not ExecutionStatus.TERMINATED


async def result_of(
    temporal: TemporalClient, error: WorkflowFailureError, handle: WorkflowHandle[Any, JobResult]
) -> JobResult:
    """The result of a job whose workflow did not complete.

    Raises:
        Refused: if the job never began, because its specification was wrong or not encrypted.
    """
    cause = error.cause
    if isinstance(cause, ApplicationError):
        if cause.type == "JobFailed" and cause.details:
            return JobResult.model_validate(cause.details[0])
        if cause.type in ("InvalidSpec", UNREADABLE_JSON):
            raise Refused(f"the job's specification is wrong:\n{cause.message}") from error
        if cause.type == REFUSED_PAYLOAD:
            raise start_refusal(cause) from error
        return await _reconstruct(
            temporal, handle, JobPhase.FAILED, ExitCode.INFRASTRUCTURE, f"the workflow failed: {cause.message}"
        )
    if isinstance(cause, CancelledError):
        return await _reconstruct(temporal, handle, JobPhase.CANCELLED, ExitCode.CANCELLED, "")
    if isinstance(cause, TerminatedError):
        reason = f"the workflow was terminated{f': {cause.message}' if cause.message else ''}"
        return await _reconstruct(temporal, handle, JobPhase.CANCELLED, ExitCode.CANCELLED, reason)
    if isinstance(cause, TimeoutError):
        return await _reconstruct(
            temporal, handle, JobPhase.FAILED, ExitCode.DEADLINE, "the workflow's own time limit was reached"
        )
    return await _reconstruct(temporal, handle, JobPhase.FAILED, ExitCode.INFRASTRUCTURE, str(cause))


def start_refusal(cause: ApplicationError) -> Refused:
    """The error for a workflow that was started with a payload that the worker does not read."""
    return Refused(
        f"the job was refused: {cause.message}",
        remedy="`perdure run` and `perdure submit` encrypt; Temporal's own command line needs a codec server: "
        "`perdure codec-server -- temporal workflow start …`, see docs/encryption.md.",
    )


async def _reconstruct(
    temporal: TemporalClient, handle: WorkflowHandle[Any, JobResult], phase: JobPhase, exit_code: ExitCode, reason: str
) -> JobResult:
    """Makes a result from the job's last state, including its reason if none is given; without a worker, from what the
    server knows."""
    now = datetime.now(UTC)
    try:
        description = await describe(temporal, handle.id, run_id=handle.run_id or "", rpc_timeout=CALL_TIMEOUT)
        started, finished = description.start_time, description.close_time or now
    except RPCError:
        started = finished = now
    try:
        status = await query(handle, "status", result_type=JobStatus, rpc_timeout=CALL_TIMEOUT)
    except (RPCError, QueryRejected):
        status = None
    return JobResult(
        phase=phase,
        exit_code=exit_code,
        reason=reason or (status.reason if status else "cancelled"),
        generations=status.generation if status else 0,
        restarts=status.restarts if status else 0,
        step=status.progress.step if status and status.progress else None,
        started_at=status.started_at if status else started,
        finished_at=finished,
    )
