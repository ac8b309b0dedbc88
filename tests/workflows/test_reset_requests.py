"""What a job requests of its ranks after it was reset: they follow each number once, and it has forgotten some."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.contract import (
    CheckpointCommitted,
    CheckpointRef,
    CheckpointStored,
    HoldRequest,
    JobPhase,
    NodeRequest,
    ReasonRequest,
    RestartRequest,
    SnapshotUse,
    Stepping,
    StoredCheckpoint,
)
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import node, reset, running, tasks, until
from tests.workflows.played_node import PlayedNode, now

Job = WorkflowHandle[Any, Any]
STORAGE = {"checkpoint": {"storage": "file:///ckpt", "save_timeout": "1h"}}


class SplitNode(PlayedNode):
    """Each of its ranks has a part of the state."""

    async def step(self) -> None:
        use = SnapshotUse(replicated=False, copies=1)
        await self.to_group("stepping", Stepping, generation=self.generation, entered_at=now(), snapshots=use)


class SplitFleet(Fleet):
    def make_node(self, request: NodeRequest) -> PlayedNode:
        return SplitNode(self, request)


@pytest.fixture
async def fleet(temporal_client: Client) -> AsyncIterator[Fleet]:
    async with running_fleet(temporal_client, fleet_type=SplitFleet) as fleet:
        yield fleet


async def training(fleet: Fleet) -> tuple[Job, list[PlayedNode]]:
    """A job of two nodes that stores checkpoints."""
    started = await submit(fleet, job_spec("2", **STORAGE))
    job = fleet.client.get_workflow_handle(started.id)
    await running(job, nodes=2)
    return job, [await node(fleet, job, rank) for rank in range(2)]


async def hold_after(played: PlayedNode, followed: int) -> HoldRequest:
    """The request to wait at a step that the node receives, once it is one that its ranks have not followed."""

    def is_there() -> bool:
        return played.desired.hold is not None and played.desired.hold.number > followed

    await eventually(is_there, what=f"a request to wait at a step after number {followed}")
    assert played.desired.hold is not None
    return played.desired.hold


async def request_after(played: PlayedNode, followed: int) -> int:
    """The same of a request for a checkpoint: an agent remembers the highest number."""
    await eventually(
        lambda: played.desired.checkpoint_request > followed,
        what=f"a request for a checkpoint after number {followed}",
    )
    return played.desired.checkpoint_request


def checkpoint(played: PlayedNode, step: int) -> CheckpointRef:
    return CheckpointRef(step=step, run=played.request.node.uid, generation=played.generation)


async def hold(played: PlayedNode, request: HoldRequest, *, step: int) -> None:
    """All ranks wait at a step."""
    held = StoredCheckpoint(checkpoint=checkpoint(played, step), answers=request.number, in_memory=True)
    await played.to_group("checkpoint_stored", CheckpointStored, stored=held)


async def store(nodes: list[PlayedNode], *, step: int, answers: int) -> None:
    """The checkpoint of a step becomes durable."""
    for one in nodes:
        stored = StoredCheckpoint(checkpoint=checkpoint(one, step), answers=answers)
        await one.to_group("checkpoint_stored", CheckpointStored, stored=stored)

    def decided() -> bool:
        commit = nodes[0].desired.commit
        return commit is not None and commit.checkpoint.step == step

    await eventually(decided, what=f"the commit of step {step}")
    await nodes[0].to_group("checkpoint_committed", CheckpointCommitted, checkpoint=checkpoint(nodes[0], step))


async def task_after_update(job: Job) -> int | None:
    """The first task that knows of the job's update: a reset to the task that accepts it forgets it."""
    accepted = False
    async for event in job.fetch_history_events():
        if event.HasField("workflow_execution_update_accepted_event_attributes"):
            accepted = True
        elif accepted and event.HasField("workflow_task_completed_event_attributes"):
            return event.event_id
    return None


async def test_a_job_that_is_reset_while_its_ranks_wait_has_them_wait_again_and_is_suspended(fleet: Fleet):
    job, nodes = await training(fleet)
    await job.execute_update("suspend", ReasonRequest())
    first = await hold_after(nodes[0], 0)
    answered = await request_after(nodes[0], 0)
    assert first.stores == answered
    requested = await eventually(lambda: task_after_update(job))
    # What follows is forgotten: the ranks wait at step 40, and its checkpoint is stored.
    await hold(nodes[0], first, step=40)
    for one in nodes:
        parts = StoredCheckpoint(checkpoint=checkpoint(one, 40), answers=answered)
        await one.to_group("checkpoint_stored", CheckpointStored, stored=parts)
    await eventually(lambda: nodes[0].desired.commit is not None, what="the commit of step 40")
    await reset(job, to=requested, reapply=False)
    again = await hold_after(nodes[0], first.number)
    request = await request_after(nodes[0], answered)
    assert again == first.replace(number=again.number, stores=request)
    await hold(nodes[0], again, step=42)
    await store(nodes, step=42, answers=request)
    known = await until(job, lambda s: s.phase is JobPhase.SUSPENDED)
    assert known.checkpoint.step == 42


@pytest.mark.parametrize("to_its_first_task", [True, False], ids=["first-task", "later-task"])
async def test_a_checkpoint_that_is_requested_after_a_reset_has_a_number_of_its_own(
    fleet: Fleet, to_its_first_task: bool
):
    job, nodes = await training(fleet)
    before = (await tasks(job))[0 if to_its_first_task else -1]
    await job.execute_update("save_checkpoint", ReasonRequest())
    followed = await request_after(nodes[0], 0)
    await store(nodes, step=40, answers=followed)
    await until(job, lambda s: s.checkpoint.answered == followed)
    await reset(job, to=before, reapply=False)
    await running(job, nodes=2)
    await job.execute_update("save_checkpoint", ReasonRequest())
    request = await request_after(nodes[0], followed)
    await store(nodes, step=50, answers=request)
    await until(job, lambda s: s.checkpoint.answered == request)


async def test_a_job_that_is_reset_to_its_beginning_knows_what_it_has_stored(fleet: Fleet):
    job, nodes = await training(fleet)
    await job.execute_update("save_checkpoint", ReasonRequest())
    await store(nodes, step=40, answers=await request_after(nodes[0], 0))
    await until(job, lambda s: s.checkpoint.step == 40)
    await job.execute_update("restart", RestartRequest())
    await running(job, nodes=2, generation=2)
    await reset(job, to=(await tasks(job))[0], reapply=False)
    await running(job, nodes=2, generation=3)
    world = nodes[0].desired.world
    assert world is not None
    assert world.known is not None
    assert [one.checkpoint.step for one in world.known.stored] == [40]
