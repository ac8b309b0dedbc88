"""Jobs that a test plays: their workflows answer what the test says, and end when it says so."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.contract import IncidentView, JobStatus
from perdure.contract.names import TRAINING_JOB
from perdure.workflows.history import HistoryRecorder, ReadHistory
from tests.activities.history.stored import status

SPEC = {
    "name": "llama",
    "labels": {"team": "nlp"},
    "roles": {"trainer": {"nodes": "2:4", "image": "acme/llama:1", "command": ["torchrun", "train.py", "--lr", "1"]}},
}


@workflow.defn(name=TRAINING_JOB)
class PlayedJob:
    """Answers as a job does."""

    def __init__(self) -> None:
        self._status = status()
        self._incidents: list[IncidentView] = []
        self._end: bool | None = None

    @workflow.run
    async def run(self, _: Any) -> None:
        await workflow.wait_condition(lambda: self._end is not None)
        if not self._end:
            raise ApplicationError("it failed", non_retryable=True)

    @workflow.signal
    def play(self, status: JobStatus, incidents: list[IncidentView]) -> None:
        self._status, self._incidents = status, incidents

    @workflow.signal
    def end(self, well: bool) -> None:
        self._end = well

    @workflow.query
    def status(self) -> JobStatus:
        return self._status

    @workflow.query
    def incidents(self) -> list[IncidentView]:
        return self._incidents


@asynccontextmanager
async def jobs_are_played(client: Client) -> AsyncGenerator[str]:
    """Serves played jobs, and the workflows of the history; yields the task queue."""
    queue = f"history-{uuid4().hex[:8]}"
    async with Worker(
        client,
        task_queue=queue,
        workflows=[PlayedJob, HistoryRecorder, ReadHistory],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield queue


async def start_job(client: Client, queue: str, spec: Any = SPEC) -> WorkflowHandle[Any, None]:
    return await client.start_workflow(PlayedJob.run, spec, id=f"job/nlp/{uuid4().hex[:8]}", task_queue=queue)
