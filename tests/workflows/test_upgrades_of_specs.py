"""A job whose specification the release of a worker cannot read, as while workers of two releases serve one queue."""

from __future__ import annotations

from datetime import UTC, datetime

from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowExecutionStatus

from perdure.spec.validate import parse_spec
from perdure.workflows.policy.state.job import JobState
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec


async def test_a_later_run_that_an_older_worker_cannot_read_waits_for_a_newer_one(fleet: Fleet):
    spec = job_spec("1")
    state = JobState.begin(parse_spec(spec), uid="0123abcd", now=datetime.now(UTC))
    later = spec | {"roles": "as a later release writes them"}
    job = await fleet.client.start_workflow(
        "TrainingJob", args=[later, state], id=f"job/default/{spec['name']}", task_queue=fleet.task_queue
    )

    async def has_failed_a_task() -> bool:
        described = await job.describe()
        assert described.status is WorkflowExecutionStatus.RUNNING, "its nodes train, and must not be ended"
        kind = EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
        return any([event.event_type == kind async for event in job.fetch_history_events()])

    await eventually(has_failed_a_task, what="the worker cannot go on with the job")
    await job.terminate()
