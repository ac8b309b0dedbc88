"""Uploads a job's code for its nodes, before the job starts: see `perdure.workflows.workdir_upload`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

from rich.filesize import decimal
from temporalio.client import (
    Client,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.errors import NoWorker, Refused
from perdure.base.executions import update
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.workdir import PackedWorkdir, pack_workdir_of
from perdure.contract import WorkdirRequest
from perdure.contract.names import WORKDIR_UPLOAD, job_workflow_id, workdir_workflow_id
from perdure.spec.data import WorkdirArchive
from perdure.spec.job import JobSpec

PART_BYTES = 480 * 1024
"""Temporal warns of messages from 512 KiB on, and refuses them from 2 MiB on."""
PART_TIMEOUT = timedelta(seconds=30)
"""The limit for one part: over a slow line, and with retries of the API server."""
REPORT_INTERVAL = 2.0
"""Seconds between two lines about a long upload."""

Report = Callable[[str], None]
"""A function that is called with lines about the progress, for people."""


@asynccontextmanager
async def upload_workdir(
    temporal: Client, job: JobSpec, *, task_queue: str, report: Report | None = None
) -> AsyncGenerator[JobSpec]:
    """Uploads the job's code if its nodes need that; leaving the context without an error means that the job runs.

    Yields:
        The specification to start the job with.

    Raises:
        SpecError: if the code cannot be packed.
        Refused: if the upload is rejected.
        NoWorker: if no worker takes it.
        RPCError: if the server does not answer.
    """
    packed = await asyncio.to_thread(pack_workdir_of, job)
    if packed is None or job.workdir is None:
        yield job
        return
    archive = WorkdirArchive(
        name=f"perdure-workdir-{secrets.token_hex(8)}",
        parts=-(-len(packed.content) // PART_BYTES),
        digest=packed.digest,
    )
    upload = await temporal.start_workflow(
        WORKDIR_UPLOAD,
        WorkdirRequest(
            archive=archive,
            backend=job.backend,
            namespace=job.namespace,
            job_id=job_workflow_id(job.namespace, job.name),
            source=job.workdir.path,
        ),
        id=workdir_workflow_id(job.namespace, archive.name),
        task_queue=task_queue,
        static_summary=f"code of {job.name}: {packed}",
        rpc_timeout=CALL_TIMEOUT,
    )
    try:
        await _send(upload, packed, report or (lambda _: None))
        workdir = job.workdir.model_copy(update={"archive": archive})
        yield job.model_copy(update={"workdir": workdir})
    except BaseException:
        # On Ctrl-C as well: nothing should be left. If this fails, the upload ends by itself.
        with suppress(RPCError):
            await upload.cancel(rpc_timeout=CALL_TIMEOUT)
        raise
    with suppress(RPCError):
        await upload.signal("job_started", rpc_timeout=CALL_TIMEOUT)


async def _send(upload: WorkflowHandle[Any, Any], packed: PackedWorkdir, report: Report) -> None:
    report(f"Uploading the working directory: {packed}")
    reported_at = time.monotonic()
    for index, begin in enumerate(range(0, len(packed.content), PART_BYTES)):
        if time.monotonic() - reported_at > REPORT_INTERVAL:
            reported_at = time.monotonic()
            report(f"  {decimal(begin)} of {decimal(len(packed.content))}")
        await _send_part(upload, index, packed.content[begin : begin + PART_BYTES])


async def _send_part(upload: WorkflowHandle[Any, Any], index: int, content: bytes) -> None:
    try:
        await update(upload, "part", args=[index, content], result_type=type(None), rpc_timeout=PART_TIMEOUT)
    except WorkflowUpdateFailedError as error:
        raise Refused(f"the code of workdir was not taken: {_reason(error)}") from error
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        raise NoWorker(
            f"no worker took the code of workdir within {PART_TIMEOUT.total_seconds():.0f} s",
            remedy="A worker of this release has to run when a job with a workdir is submitted: `perdure doctor`.",
        ) from error
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise Refused("the upload of workdir has ended before it was complete", remedy="Submit again.") from error
        raise


def _reason(error: WorkflowUpdateFailedError) -> str:
    cause = error.cause
    if isinstance(cause, ActivityError) and cause.cause is not None:
        cause = cause.cause
    return cause.message if isinstance(cause, ApplicationError) else str(cause)
