"""Tests that jobs survive what operators do to their workflows and activities in Temporal, alone and in batches."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.executions import OPEN, ExecutionDescription, describe, list_executions
from perdure.client.pauses import explain, pauses_below
from perdure.contract import DatasetNeeded, DatasetParameters, JobPhase, StoreNeeded
from perdure.contract.names import dataset_workflow_id, store_workflow_id
from tests.support.temporal_operator import Operator
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import node, running, until
from tests.workflows.played_node import PlayedNode

Handle = WorkflowHandle[Any, Any]

SOON = {"owner_check": "500ms"}
"""Watches ask often whether the job still exists."""


@pytest.fixture
def operator(temporal_client: Client) -> Operator:
    return Operator(temporal_client)


async def started(fleet: Fleet, **fields: Any) -> tuple[Handle, str, list[PlayedNode]]:
    """A job that runs on two nodes with leases, and its group."""
    job = fleet.client.get_workflow_handle((await submit(fleet, job_spec("2", timing=SOON, **fields))).id)
    [group] = (await running(job, nodes=2)).groups
    nodes = [await node(fleet, job, rank) for rank in range(2)]
    for played in nodes:
        await eventually(lambda played=played: bool(played.lease_epochs), what="a lease is held")
    return job, group, nodes


async def known(fleet: Fleet, workflow_id: str) -> ExecutionDescription | None:
    """The workflow; None if the server does not know it."""
    try:
        return await describe(fleet.client, workflow_id)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return None


async def is_unknown(fleet: Fleet, workflow_id: str) -> bool:
    return await known(fleet, workflow_id) is None


async def is_open(fleet: Fleet, workflow_id: str) -> bool:
    found = await known(fleet, workflow_id)
    return found is not None and found.is_open


async def undisturbed(fleet: Fleet, job: Handle) -> None:
    """The job runs in the same world, and its node can still be repaired."""
    assert (await running(job, nodes=2, generation=1)).last_incident is None
    assert not fleet.deleted
    await (await node(fleet, job, 1)).rank_dies()
    repaired = await running(job, nodes=2, generation=2)
    assert repaired.last_incident is not None


async def end(job: Handle) -> None:
    await job.cancel()
    with pytest.raises(WorkflowFailureError) as ended:
        await job.result()
    assert isinstance(ended.value.cause, CancelledError)


async def activity_id(fleet: Fleet, workflow_id: str, kind: str) -> str:
    """The ID of the workflow's pending activity of this type."""
    [found] = [
        one.activity_id
        for one in (await describe(fleet.client, workflow_id)).pending_activities
        if one.activity_type.name == kind
    ]
    return found


async def takes_effect(fleet: Fleet, workflow_id: str, paused: str) -> None:
    """The worker has given up the activity: it learns of a pause with the answer to a heartbeat."""

    async def given_up() -> bool:
        return any(
            one.activity_id == paused and one.state == PendingActivityState.PENDING_ACTIVITY_STATE_PAUSED
            for one in (await describe(fleet.client, workflow_id)).pending_activities
        )

    await eventually(given_up, what=f"{paused} is given up")


async def test_nodes_of_a_deleted_job_are_wound_down(fleet: Fleet, operator: Operator):
    job, group, nodes = await started(fleet)
    uid = nodes[0].request.node.uid
    await nodes[0].to_group("store_needed", StoreNeeded)
    store = store_workflow_id(job.id, uid)
    await eventually(lambda: is_open(fleet, store), what="the store runs")
    await operator.delete(job.id)
    for workflow in (group, store):
        await fleet.client.get_workflow_handle(workflow).result()
    assert len(fleet.deleted) == 2
    assert await is_unknown(fleet, job.id)


async def test_a_deleted_group_is_started_again_and_keeps_its_nodes(fleet: Fleet, operator: Operator):
    job, group, nodes = await started(fleet)
    first_run = (await describe(fleet.client, group)).run_id
    for played in nodes:
        played.lease_epochs.clear()
    await operator.delete(group)

    async def runs_again() -> bool:
        found = await known(fleet, group)
        return found is not None and found.run_id != first_run

    await eventually(runs_again, what="the group runs again")
    await eventually(lambda: all(played.lease_epochs for played in nodes), what="leases are held again")
    await undisturbed(fleet, job)
    await end(job)


@pytest.mark.long("workflows")
@pytest.mark.parametrize("how", ["terminated", "deleted"])
async def test_a_store_and_a_dataset_that_are_gone_begin_again_when_they_are_needed(
    fleet: Fleet, operator: Operator, how: str
):
    job, _, nodes = await started(fleet)
    uid = nodes[0].request.node.uid
    parameters = DatasetParameters(size=100, shard_size=10)
    workflows = [store_workflow_id(job.id, uid), dataset_workflow_id(job.id, uid, "train")]

    async def need() -> None:
        """As agents report it whenever the server does not know the workflow."""
        await nodes[0].to_group("store_needed", StoreNeeded)
        await nodes[0].to_group("dataset_needed", DatasetNeeded, name="train", parameters=parameters)
        for workflow in workflows:
            await eventually(lambda workflow=workflow: is_open(fleet, workflow), what=f"{workflow} runs")

    await need()
    for workflow in workflows:
        if how == "deleted":
            await operator.delete(workflow)
            await eventually(lambda workflow=workflow: is_unknown(fleet, workflow), what=f"{workflow} is gone")
        else:
            await fleet.client.get_workflow_handle(workflow).terminate()
    await need()
    await undisturbed(fleet, job)
    await end(job)


@pytest.mark.long("workflows")
async def test_a_watch_that_is_paused_is_named_and_sees_what_was_lost_once_it_is_unpaused(
    fleet: Fleet, operator: Operator
):
    job, group, _ = await started(fleet)
    watch = await activity_id(fleet, group, "watch_nodes")
    await operator.pause_activity(group, watch)
    [pause] = await pauses_below(fleet.client, job.id)
    assert explain(pause).startswith(f"watch_nodes ({watch}) of {group} is paused in Temporal")
    await takes_effect(fleet, group, watch)
    fleet.withhold_events = True
    await fleet.lose(await node(fleet, job, 1))
    await operator.unpause_activity(group, watch)
    assert (await running(job, nodes=2, generation=2)).last_incident is not None
    assert await pauses_below(fleet.client, job.id) == ()
    await end(job)


@pytest.mark.long("workflows")
async def test_a_watch_that_is_reset_is_begun_again(fleet: Fleet, operator: Operator):
    job, group, _ = await started(fleet)
    watches = fleet.watches
    await operator.reset_activity(group, await activity_id(fleet, group, "watch_nodes"))
    await eventually(lambda: fleet.watches > watches, what="the watch is begun again")
    await undisturbed(fleet, job)
    await end(job)


@pytest.mark.long("workflows")
async def test_a_lease_that_is_reset_is_held_again(fleet: Fleet, operator: Operator):
    job, group, nodes = await started(fleet)
    held = len(nodes[1].lease_epochs)
    await operator.reset_activity(group, f"lease/1/1/{nodes[1].lease_epochs[-1]}")
    await eventually(lambda: len(nodes[1].lease_epochs) > held, what="the lease is held again")
    await undisturbed(fleet, job)
    await end(job)


@pytest.mark.long("workflows")
async def test_a_node_whose_creation_is_paused_is_created_once_that_is_unpaused(fleet: Fleet, operator: Operator):
    fleet.endless = {1}
    job = await submit(fleet, job_spec("2"))
    group = (await until(job, lambda s: bool(s.groups))).groups[0]

    async def begun() -> str | None:
        """The creation of node 1, once that of node 0 is over."""
        if (job.id, 0, 1) not in fleet.nodes:
            return None
        pending = [
            one.activity_id
            for one in (await describe(fleet.client, group)).pending_activities
            if one.activity_type.name == "create_node"
        ]
        return pending[0] if len(pending) == 1 else None

    creation = await eventually(begun, what="node 1 is being created")
    await operator.pause_activity(group, creation)
    [pause] = await pauses_below(fleet.client, job.id)
    assert explain(pause).startswith(f"create_node ({creation}) of {group} is paused in Temporal")
    await takes_effect(fleet, group, creation)
    fleet.endless = set()
    await operator.unpause_activity(group, creation)
    await running(job, nodes=2)
    await end(job)


@pytest.mark.parametrize("how", ["cancel", pytest.param("terminate", marks=pytest.mark.long("workflows"))])
async def test_a_batch_that_ends_jobs_ends_their_groups_and_nodes(fleet: Fleet, operator: Operator, how: str):
    job, group, _ = await started(fleet)
    await listed(fleet, job, count=2)
    everything = f"WorkflowId STARTS_WITH '{job.id}'"
    if how == "cancel":
        await operator.batch(everything, cancel=True)
    else:
        await operator.batch(f"WorkflowType = 'TrainingJob' AND {everything}", terminate=True)
    with pytest.raises(WorkflowFailureError):
        await job.result()
    await eventually(lambda: len(fleet.deleted) == 2, what="the nodes are deleted")

    async def closed() -> bool:
        return not await is_open(fleet, group)

    await eventually(closed, what="the group is closed")


async def test_a_group_a_store_and_a_dataset_that_are_cancelled_alone_or_signaled_in_a_batch_go_on(
    fleet: Fleet, operator: Operator
):
    job, group, nodes = await started(fleet)
    uid = nodes[0].request.node.uid
    parameters = DatasetParameters(size=100, shard_size=10)
    await nodes[0].to_group("store_needed", StoreNeeded)
    await nodes[0].to_group("dataset_needed", DatasetNeeded, name="train", parameters=parameters)
    workflows = [group, store_workflow_id(job.id, uid), dataset_workflow_id(job.id, uid, "train")]
    for workflow in workflows:
        await eventually(lambda workflow=workflow: is_open(fleet, workflow), what=f"{workflow} runs")
    runs = [(await describe(fleet.client, workflow)).run_id for workflow in workflows]
    for workflow in workflows:
        await fleet.client.get_workflow_handle(workflow).cancel()
    await listed(fleet, job, count=4)
    await operator.batch(f"WorkflowId STARTS_WITH '{job.id}'", signal="made-up")
    await undisturbed(fleet, job)
    for workflow, run_id in zip(workflows, runs, strict=True):
        described = await describe(fleet.client, workflow)
        assert (described.run_id, described.is_open) == (run_id, True)
    await end(job)
    for workflow in workflows:
        await fleet.client.get_workflow_handle(workflow).result()


async def test_a_job_whose_worker_is_busy_with_a_paused_group_is_cancelled_once_it_is_unpaused(
    fleet: Fleet, operator: Operator
):
    job, group, _ = await started(fleet)
    await operator.pause(group)
    await job.cancel()
    assert (await until(job, lambda s: s.phase is JobPhase.STOPPING)).groups == (group,)
    assert not fleet.deleted
    await operator.unpause(group)
    with pytest.raises(WorkflowFailureError):
        await job.result()
    assert len(fleet.deleted) == 2


async def listed(fleet: Fleet, job: Handle, *, count: int) -> None:
    """Visibility, by which a batch finds workflows, lags a little."""

    async def found() -> bool:
        query = f"WorkflowId STARTS_WITH '{job.id}' AND {OPEN}"
        return len([one async for one in list_executions(fleet.client, query)]) >= count

    await eventually(found, what="visibility shows the job and its group")
