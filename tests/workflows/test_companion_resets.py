"""The workflows beside a job that are reset by Temporal's tools: what they know is kept, and their job goes on."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError

from perdure.contract import DatasetView, FailureKind, StoreAction, StoreNeeded, StoreView
from perdure.contract.names import SCHEDULED_JOB, dataset_workflow_id
from perdure.workflows.policy.services.spans import size, union
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import node, reset, running, status, tasks
from tests.workflows.played_node import PlayedNode
from tests.workflows.test_dataset import QUICK_END, Reader, begin
from tests.workflows.test_schedules import job_of, schedule_of, trigger
from tests.workflows.test_store import Caller, two_callers

Handle = WorkflowHandle[Any, Any]


async def task_of(workflow: Handle, *, first: bool) -> int:
    return (await tasks(workflow))[0 if first else -1]


async def test_a_dataset_that_is_reset_has_every_sample_read_once(fleet: Fleet):
    job = await submit(fleet, job_spec("1"))
    await running(job, nodes=1)
    played = await node(fleet, job, 0)
    await begin(job, played)
    reader = Reader(fleet, job.id, played, 0)
    await reader.exchange(shards=4)
    reader.consumed = reader.holds
    await reader.exchange(shards=4, done=reader.holds)
    dataset = fleet.client.get_workflow_handle(dataset_workflow_id(job.id, played.request.node.uid, "train"))
    before = await dataset.query("progress", result_type=DatasetView)
    assert before.done > 0
    for first in (False, True):
        await reset(dataset, to=await task_of(dataset, first=first))
        assert await dataset.query("progress", result_type=DatasetView) == before
    held = reader.holds
    await reader.read_all()
    assert union(reader.consumed, held) == ((0, 2000),)
    assert size(reader.consumed) + size(held) == 2000


async def test_a_store_that_is_reset_keeps_its_keys(fleet: Fleet):
    _, one, other = await two_callers(fleet)
    await one.ask(StoreAction.ADD, "count", amount=3)
    before = await one.store.query("usage", result_type=StoreView)
    for first in (False, True):
        await reset(one.store, to=await task_of(one.store, first=first))
        assert await one.store.query("usage", result_type=StoreView) == before
    assert (await other.ask(StoreAction.ADD, "count", amount=2)).number == 5


async def test_a_job_trains_on_when_the_workflow_of_its_schedule_is_reset(fleet: Fleet):
    spec = job_spec("1")
    async with schedule_of(fleet, SCHEDULED_JOB, spec) as schedule:
        started = await trigger(fleet, schedule)
        job = await job_of(fleet, spec)
        before = await running(job, nodes=1)
        started = fleet.client.get_workflow_handle(started.id)
        for first in (False, True):
            await reset(started, to=await task_of(started, first=first))
            if first:
                # It starts the job of that name once more.
                with pytest.raises(WorkflowFailureError) as refused:
                    await started.result()
                assert isinstance(refused.value.cause, ApplicationError)
                assert refused.value.cause.type == "JobAlreadyRunning"
            known = await status(job)
            assert (known.uid, known.generation, known.phase) == (before.uid, before.generation, before.phase)
            assert known.restarts == 0


@pytest.mark.long("workflows")
async def test_a_job_ends_with_the_workflow_of_its_schedule_that_was_reset_to_its_last_task(fleet: Fleet):
    spec = job_spec("1")
    async with schedule_of(fleet, SCHEDULED_JOB, spec) as schedule:
        started = await trigger(fleet, schedule)
        job = await job_of(fleet, spec)
        await running(job, nodes=1)
        started = fleet.client.get_workflow_handle(started.id)
        await reset(started, to=await task_of(started, first=False))
        await job.cancel()
        with pytest.raises(WorkflowFailureError):
            await started.result()


async def failed_and_reset(fleet: Fleet, job: Handle, *companions: Handle) -> PlayedNode:
    """Fails a job, and resets it to its first task once the workflows beside it have ended; returns its new node."""
    await (await node(fleet, job, 0)).fail(kind=FailureKind.COMMAND, exit_code=1)
    with pytest.raises(WorkflowFailureError):
        await job.result()
    for companion in companions:
        await companion.result()
    fleet.nodes.clear()
    await reset(job)
    await running(fleet.client.get_workflow_handle(job.id), nodes=1)
    return await node(fleet, job, 0)


async def test_a_job_that_has_ended_and_is_reset_has_its_dataset_and_its_store_again(fleet: Fleet):
    job = await submit(fleet, job_spec("1", timing=QUICK_END, retry={"max_restarts": 0}))
    await running(job, nodes=1)
    played = await node(fleet, job, 0)
    await begin(job, played)
    await played.to_group("store_needed", StoreNeeded)
    reader, caller = Reader(fleet, job.id, played, 0), Caller(fleet, played)
    await reader.exchange(shards=4)
    await caller.ask(StoreAction.ADD, "count", amount=3)
    dataset = fleet.client.get_workflow_handle(dataset_workflow_id(job.id, played.request.node.uid, "train"))
    played = await failed_and_reset(fleet, job, dataset, caller.store)
    await begin(job, played)
    await played.to_group("store_needed", StoreNeeded)
    reader = Reader(fleet, job.id, played, 0)
    await reader.read_all()
    assert reader.consumed == ((0, 2000),), "the job runs again, and reads all of its samples"
    assert (await Caller(fleet, played).ask(StoreAction.ADD, "count", amount=2)).number == 2
