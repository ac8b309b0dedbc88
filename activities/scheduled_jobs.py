"""Waits, for a schedule that starts a job again, until the earlier job of that name has wound down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from perdure.base.executions import ExecutionDescription, find
from perdure.workflows import options
from perdure.workflows.scheduled_job import AWAIT_END


class ScheduledJobActivities:
    """Asks the server about jobs that schedules have started."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def all(self) -> Sequence[Callable[..., Any]]:
        return (self.await_end,)

    @activity.defn(name=AWAIT_END)
    async def await_end(self, job_id: str) -> None:
        """Returns once the job has ended. Raises an error that is retried while it winds down, and another one if it
        does not: then it is left alone."""
        job = await find(self._client, job_id, rpc_timeout=options.SIGNAL_TIMEOUT)
        if job is None or not job.is_open:
            return
        if await self._winds_down(job):
            raise ApplicationError("the job that the schedule has ended winds down", type="WindsDown")
        name, namespace = job_id.rpartition("/")[2], job_id.split("/")[1]
        raise ApplicationError(
            f'a job named "{name}" is already running in the namespace {namespace}',
            type="JobAlreadyRunning",
            non_retryable=True,
        )

    async def _winds_down(self, job: ExecutionDescription) -> bool:
        """Whether the job was requested to end, or is about to be: its schedule's workflow is closed."""
        if job.raw.workflow_extended_info.cancel_requested:
            return True
        if not job.info.HasField("parent_execution"):
            return False
        parent = job.info.parent_execution
        if parent.workflow_id == activity.info().workflow_id:
            # The workflow that asks was reset, and has started the job before: a reset ends no job.
            return False
        known = await find(self._client, parent.workflow_id, run_id=parent.run_id, rpc_timeout=options.SIGNAL_TIMEOUT)
        return known is None or not known.is_open
