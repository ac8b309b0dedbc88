"""Tests of one job whose command starts several torchruns, on a real server, with simulated nodes."""

from __future__ import annotations

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from perdure.contract import FailureKind, JobPhase
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import incidents, node, running, status, until
from tests.workflows.played_node import PlayedNode
from tests.workflows.ways import also_replayed


async def knows(agent: PlayedNode, *, stages: int) -> None:
    await eventually(lambda: agent.stages_complete == stages, what=f"node {agent.rank} learns of {stages} stages")


@pytest.mark.long("workflows")
@also_replayed
async def test_two_stages_with_a_failure_and_a_lost_node_between_them(fleet: Fleet) -> None:
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    first, second = await node(fleet, job, 0), await node(fleet, job, 1)
    for agent in (first, second):
        await agent.finish(command_runs=True)
    for agent in (first, second):
        await knows(agent, stages=1)
    assert (await status(job)).phase is JobPhase.RUNNING
    # What follows the first torchrun fails on one node, and the other node is lost.
    await first.fail(kind=FailureKind.COMMAND, exit_code=7, message="the command exited with 7")
    await eventually(lambda: first.command_restarts == 1, what="the command is started again")
    await first.ready(stage=0)
    await until(job, lambda known: known.phase is JobPhase.RUNNING)
    await fleet.lose(second)
    second = await node(fleet, job, 1, incarnation=2)
    await knows(second, stages=1)
    await second.ready(stage=0)
    known = await until(job, lambda known: known.phase is JobPhase.RUNNING)
    assert known.generation == 1
    for agent in (first, second):
        await agent.ready(stage=1)
    await running(job, nodes=2, generation=2)
    assert [world.stage for world in first.worlds] == [0, 1]
    assert [world.stage for world in second.worlds] == [1]
    for agent in (first, second):
        await agent.finish(command_runs=True)
        await agent.finish()
    result = await job.result()
    assert result["reason"] == "the command ended with 0 on every node; 2 torchruns finished"
    assert [incident.generation_after for incident in await incidents(job)] == [None, None]
    assert all(incident.over_at for incident in await incidents(job))


@also_replayed
async def test_a_command_that_fails_after_its_torchrun_again_and_again_fails_the_job(fleet: Fleet) -> None:
    job = await submit(fleet, job_spec("1", retry={"no_progress_limit": 1}))
    await running(job, nodes=1)
    agent = await node(fleet, job, 0)
    await agent.finish(command_runs=True)
    await knows(agent, stages=1)
    await agent.fail(kind=FailureKind.COMMAND, exit_code=7, message="the command exited with 7")
    await eventually(lambda: agent.command_restarts == 1, what="the command is started again")
    await agent.fail(kind=FailureKind.COMMAND, exit_code=7, message="the command exited with 7")
    with pytest.raises(WorkflowFailureError) as failed:
        await job.result()
    assert isinstance(failed.value.cause, ApplicationError)
    assert "the command exited with 7" in failed.value.cause.message
