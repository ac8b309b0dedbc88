"""WorkdirUpload: keeps the code of one submission until a job uses it, and removes it if none does.

Users who submit jobs reach Temporal and not the cluster, so the code is sent through Temporal: in parts, since a
message to Temporal is small, and before the job starts, since nodes should not wait for a folder that is too large or
an upload that was interrupted. A client may vanish at any moment, so an upload ends after a time limit.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import WorkdirRequest
    from perdure.contract.names import WORKDIR_UPLOAD
    from perdure.workflows import options


@workflow.defn(name=WORKDIR_UPLOAD)
class WorkdirUpload:
    """The workflow of one upload; see the module."""

    @workflow.init
    def __init__(self, request: WorkdirRequest) -> None:
        self._request = request
        self._job_started = False
        self._over = False

    @workflow.run
    async def run(self, request: WorkdirRequest) -> str:
        # A client that gives up, for example on Ctrl-C, cancels; one that has vanished sends nothing.
        with suppress(asyncio.CancelledError, TimeoutError):
            await workflow.wait_condition(
                lambda: self._job_started, timeout=options.UPLOAD_LIMIT, timeout_summary="end of the upload"
            )
        self._over = True
        await workflow.wait_condition(workflow.all_handlers_finished)
        return await workflow.execute_activity(
            "settle_workdir",
            request,
            result_type=str,
            start_to_close_timeout=options.SHORT_ACTIVITY,
            retry_policy=options.SETTLE_RETRY,
            summary=f"leave the code to {request.job_id}, or remove it",
        )

    @workflow.update(description="One part of the archive")
    async def part(self, index: int, content: bytes) -> None:
        """Stores one part; returns when it is where nodes will find it."""
        # A local activity: the arguments of a regular one would put the code into the history once more.
        await workflow.execute_local_activity(
            "keep_workdir_part",
            args=[self._request, index, content],
            start_to_close_timeout=options.UPLOAD_PART,
            schedule_to_close_timeout=options.UPLOAD_PART,
            summary=f"part {index + 1} of {self._request.archive.parts}",
        )

    @part.validator
    def _validate_part(self, index: int, content: bytes) -> None:
        if self._over:
            raise ApplicationError("the upload is over; submit the job again")
        if not 0 <= index < self._request.archive.parts:
            raise ApplicationError(f"index: got {index}; the archive has {self._request.archive.parts} parts")

    @workflow.signal(description="The job runs: leave the code to it")
    def job_started(self) -> None:
        self._job_started = True
