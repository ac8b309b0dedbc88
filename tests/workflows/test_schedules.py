"""Tests of jobs that a schedule of Temporal starts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import (
    Schedule,
    ScheduleActionExecutionStartWorkflow,
    ScheduleActionStartWorkflow,
    ScheduleHandle,
    ScheduleOverlapPolicy,
    ScheduleSpec,
    WorkflowContinuedAsNewError,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.contract.names import SCHEDULED_JOB, TRAINING_JOB, job_workflow_id
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec
from tests.workflows.jobs import node, running, status
from tests.workflows.ways import sandboxed


@asynccontextmanager
async def schedule_of(fleet: Fleet, workflow: str, spec: dict[str, Any]) -> AsyncIterator[ScheduleHandle]:
    """A schedule that starts nothing by itself; it gives workflows the ID of the job, and appends the time."""
    action = ScheduleActionStartWorkflow(
        workflow, spec, id=job_workflow_id("default", spec["name"]), task_queue=fleet.task_queue
    )
    made = await fleet.client.create_schedule(f"s-{uuid4().hex}", Schedule(action=action, spec=ScheduleSpec()))
    try:
        yield made
    finally:
        await made.delete()


async def trigger(
    fleet: Fleet, schedule: ScheduleHandle, overlap: ScheduleOverlapPolicy = ScheduleOverlapPolicy.ALLOW_ALL
) -> WorkflowHandle[Any, Any]:
    """Triggers the schedule, and returns the workflow that it has started."""
    before = (await schedule.describe()).info.num_actions
    await schedule.trigger(overlap=overlap)

    async def begun() -> str | None:
        info = (await schedule.describe()).info
        if info.num_actions == before:
            return None
        action = info.recent_actions[-1].action
        assert isinstance(action, ScheduleActionExecutionStartWorkflow)
        return action.workflow_id

    return fleet.client.get_workflow_handle(await eventually(begun, what="the schedule has started a workflow"))


async def job_of(fleet: Fleet, spec: dict[str, Any]) -> WorkflowHandle[Any, Any]:
    """The job, once it exists."""
    job = fleet.client.get_workflow_handle(job_workflow_id("default", spec["name"]))

    async def exists() -> bool:
        try:
            return bool(await job.describe())
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return False

    await eventually(exists, what=f"{job.id} exists")
    return job


@sandboxed
async def test_a_schedule_that_starts_a_job_twice_leaves_the_running_one_alone(fleet: Fleet):
    spec = job_spec("1")
    async with schedule_of(fleet, SCHEDULED_JOB, spec) as schedule:
        first = await trigger(fleet, schedule)
        job = await job_of(fleet, spec)
        assert first.id != job.id, "the schedule has appended the time"
        known = await running(job, nodes=1)
        # IDs of a schedule's workflows have a resolution of one second.
        second = await eventually(lambda: another(fleet, schedule, first.id), what="another workflow is started")
        with pytest.raises(WorkflowFailureError) as refused:
            await second.result()
        assert isinstance(refused.value.cause, ApplicationError)
        assert refused.value.cause.type == "JobAlreadyRunning"
        assert spec["name"] in refused.value.cause.message
        assert (await running(job, nodes=1, generation=1)).uid == known.uid
        await (await node(fleet, job, 0)).finish()
        assert (await first.result())["phase"] == "SUCCEEDED"


async def another(
    fleet: Fleet,
    schedule: ScheduleHandle,
    earlier: str,
    overlap: ScheduleOverlapPolicy = ScheduleOverlapPolicy.ALLOW_ALL,
) -> WorkflowHandle[Any, Any] | None:
    started = await trigger(fleet, schedule, overlap)
    return started if started.id != earlier else None


@pytest.mark.parametrize("how", ["cancelled", "terminated"])
async def test_a_job_ends_with_the_workflow_of_its_schedule(fleet: Fleet, how: str):
    spec = job_spec("1")
    async with schedule_of(fleet, SCHEDULED_JOB, spec) as schedule:
        started = await trigger(fleet, schedule)
        job = await job_of(fleet, spec)
        await running(job, nodes=1)
        await (started.cancel() if how == "cancelled" else started.terminate())
        with pytest.raises(WorkflowFailureError):
            await job.result()
        assert len(fleet.deleted) == 1


async def test_a_schedule_that_terminates_its_earlier_workflow_trains_when_that_job_has_wound_down(fleet: Fleet):
    spec = job_spec("1")
    async with schedule_of(fleet, SCHEDULED_JOB, spec) as schedule:
        # Of those that may all run at once, a schedule knows none.
        first = await trigger(fleet, schedule, ScheduleOverlapPolicy.TERMINATE_OTHER)
        job = await job_of(fleet, spec)
        known = await running(job, nodes=1)
        fleet.may_end.clear()
        second = await eventually(
            lambda: another(fleet, schedule, first.id, ScheduleOverlapPolicy.TERMINATE_OTHER),
            what="another workflow is started",
        )
        with pytest.raises(WorkflowFailureError):
            await first.result()

        async def waits() -> bool:
            return bool((await second.describe()).raw_description.pending_activities)

        await eventually(waits, what="the second workflow waits for the first one's job")
        fleet.may_end.set()

        async def trains_again() -> bool:
            try:
                return (await running(job, nodes=1)).uid != known.uid
            except RPCError:
                # The first one's job has just ended.
                return False

        await eventually(trains_again)
        await (await node(fleet, job, 0)).finish()
        assert (await second.result())["phase"] == "SUCCEEDED"


async def test_a_job_that_a_schedule_starts_directly_is_refused_with_the_remedy(fleet: Fleet):
    spec = job_spec("2")
    async with schedule_of(fleet, TRAINING_JOB, spec) as schedule:
        started = await trigger(fleet, schedule)
        with pytest.raises(WorkflowFailureError) as refused:
            await started.result()
    assert isinstance(refused.value.cause, ApplicationError)
    assert refused.value.cause.type == "InvalidSpec"
    assert f'expected "job/default/{spec["name"]}"' in refused.value.cause.message
    assert SCHEDULED_JOB in refused.value.cause.message
    assert not fleet.nodes


async def test_a_wrong_specification_in_a_schedule_fails_with_the_text_of_the_job(fleet: Fleet):
    spec = job_spec("2")
    spec["roles"]["worker"]["nods"] = 1
    async with schedule_of(fleet, SCHEDULED_JOB, spec) as schedule:
        with pytest.raises(WorkflowFailureError) as refused:
            await (await trigger(fleet, schedule)).result()
    assert isinstance(refused.value.cause, ApplicationError)
    assert 'did you mean "nodes"' in refused.value.cause.message


async def test_a_job_that_the_server_would_start_again_and_again_fails_with_the_remedy(fleet: Fleet):
    spec = job_spec("1")
    cron = await fleet.client.start_workflow(
        TRAINING_JOB,
        spec,
        id=job_workflow_id("default", spec["name"]),
        task_queue=fleet.task_queue,
        cron_schedule="@every 1s",
    )
    # The server begins the next run, which fails as well.
    with pytest.raises(WorkflowContinuedAsNewError):
        await cron.result(follow_runs=False)
    first = fleet.client.get_workflow_handle(cron.id, run_id=cron.result_run_id)
    events = [event async for event in first.fetch_history_events()]
    await fleet.client.get_workflow_handle(cron.id).terminate()
    failure = events[-1].workflow_execution_failed_event_attributes.failure
    assert failure.application_failure_info.type == "InvalidSpec"
    assert f"start the workflow type {SCHEDULED_JOB} by it" in failure.message


async def test_a_scheduled_job_that_the_server_starts_again_has_a_job_of_its_own_each_time(fleet: Fleet):
    spec = job_spec("1")
    cron = await fleet.client.start_workflow(
        SCHEDULED_JOB, spec, id=f"nightly-{spec['name']}", task_queue=fleet.task_queue, cron_schedule="@every 1s"
    )
    job = await job_of(fleet, spec)
    first = (await running(job, nodes=1)).uid
    await (await node(fleet, job, 0)).finish()

    async def another() -> bool:
        return (await status(job)).uid != first

    await eventually(another, what="the next job has begun")
    await running(job, nodes=1)
    await fleet.client.get_workflow_handle(cron.id).terminate()
    await job.cancel()
