"""Watches the jobs that own datasets, stores and archives, on behalf of `perdure.workflows.companion`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.client import Client

from perdure.agent.job_liveness import JobLiveness, OwnerLiveness, query_job_liveness
from perdure.workflows.companion import JobOwner

logger = logging.getLogger(__name__)

_CALL_TIMEOUT = timedelta(seconds=5)
_LONGEST_PAUSE = 30.0
"""The longest time in seconds between two queries: heartbeats also report to the activity that it is cancelled."""


class DatasetActivities:
    """Queries the server about jobs, with the worker's own client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def watches(self) -> Sequence[Callable[..., Any]]:
        """Activities for the queue of watches, of which one lasts for as long as a job."""
        return (self.wait_for_job_end, self.job_runs)

    @activity.defn
    async def job_runs(self, owner: JobOwner) -> bool:
        """Returns whether the server knows that the job runs, also again after a reset."""
        liveness = await query_job_liveness(
            self._client, job_id=owner.job_id, first_run_id=owner.job_first_run_id, rpc_timeout=_CALL_TIMEOUT
        )
        return liveness is JobLiveness.OPEN

    @activity.defn
    async def wait_for_job_end(self, owner: JobOwner) -> None:
        """Returns when the job has closed or was deleted. A server that does not answer, or that knows neither the job
        nor the workflow that waits, proves nothing."""
        pause = min(owner.check.total_seconds(), _LONGEST_PAUSE)
        job = OwnerLiveness(
            self._client,
            job_id=owner.job_id,
            first_run_id=owner.job_first_run_id,
            owned_id=activity.info().workflow_id or "",
            rpc_timeout=_CALL_TIMEOUT,
        )
        while True:
            activity.heartbeat()
            try:
                if await job.query() is JobLiveness.CLOSED:
                    return
            except Exception as error:
                logger.info("the state of %s could not be queried; nothing is done: %s", owner.job_id, error)
            await asyncio.sleep(pause)
