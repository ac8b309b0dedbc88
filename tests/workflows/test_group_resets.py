"""A group that is reset by Temporal's tools: its job trains on, hears its reports, and replaces its nodes as before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.contract import JobPhase, NodeView
from perdure.workflows import options
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import continue_as_new, node, reset, running, seen, status, tasks, until

LIMIT = 250
"""Events of a run, from the first one on: a replay under another limit than before would make other commands."""

Handle = WorkflowHandle[Any, Any]

HANDED = pytest.mark.parametrize("reapply", [True, False], ids=["handed-its-signals", "forgetting-signals"])


@pytest.fixture
async def brief(temporal_client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """A fleet whose runs are short."""
    monkeypatch.setattr(options, "HISTORY_LIMIT", LIMIT)
    async with running_fleet(temporal_client) as fleet:
        yield fleet


async def started(fleet: Fleet) -> tuple[Handle, Handle]:
    """A job of two nodes that trains, and its group."""
    submitted = await submit(fleet, job_spec("2"))
    job = fleet.client.get_workflow_handle(submitted.id)
    await running(job, nodes=2)
    group = (await status(job)).groups[0]
    return job, fleet.client.get_workflow_handle(group)


async def recovers(fleet: Fleet, job: Handle, incarnation: int) -> None:
    """Node 1 is lost, and its next incarnation trains: the job hears of both from the group."""
    before = await status(job)
    await fleet.lose(await node(fleet, job, 1, incarnation - 1))
    await node(fleet, job, 1, incarnation)
    await until(job, lambda s: s.phase is JobPhase.RUNNING and s.nodes == 2 and s.generation == before.generation + 1)


def incarnations(fleet: Fleet, job: Handle) -> list[tuple[int, int]]:
    return sorted((rank, incarnation) for place, rank, incarnation in fleet.nodes if place == job.id)


async def trains_on(fleet: Fleet, job: Handle, *, generation: int, incarnation: int) -> None:
    """The reset has cost no restart, and the job still receives what its group reports."""
    assert (await running(job, nodes=2)).generation == generation
    await recovers(fleet, job, incarnation)
    assert (await status(job)).generation == generation + 1


@pytest.mark.long("workflows")
@HANDED
async def test_a_job_trains_on_when_its_group_is_reset_to_its_first_task(fleet: Fleet, reapply: bool):
    job, group = await started(fleet)
    await reset(group, reapply=reapply)
    await trains_on(fleet, job, generation=1, incarnation=2)
    assert incarnations(fleet, job) == [(0, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    "reapply",
    [
        pytest.param(True, id="handed-its-signals"),
        pytest.param(False, id="forgetting-signals", marks=pytest.mark.long("workflows")),
    ],
)
async def test_a_group_that_is_reset_to_a_task_before_a_node_was_replaced_has_the_new_node(fleet: Fleet, reapply: bool):
    job, group = await started(fleet)
    middle = (await tasks(group))[-1]
    await recovers(fleet, job, 2)
    await reset(group, to=middle, reapply=reapply)
    await has_nodes(group, {0: 1, 1: 2})
    await trains_on(fleet, job, generation=2, incarnation=3)
    assert incarnations(fleet, job) == [(0, 1), (1, 1), (1, 2), (1, 3)]


@pytest.mark.long("workflows")
@HANDED
async def test_a_group_that_is_reset_twice_has_the_new_nodes(fleet: Fleet, reapply: bool):
    job, group = await started(fleet)
    middle = (await tasks(group))[-1]
    await recovers(fleet, job, 2)
    await reset(group, to=middle, reapply=reapply)
    await recovers(fleet, job, 3)
    await reset(group, reapply=reapply)
    await has_nodes(group, {0: 1, 1: 3})
    await trains_on(fleet, job, generation=3, incarnation=4)


@pytest.mark.long("workflows")
@HANDED
async def test_a_later_run_of_a_group_that_is_reset_to_its_first_task_has_the_new_node(brief: Fleet, reapply: bool):
    job, group = await started(brief)
    sender = await node(brief, job, 0)
    await continue_as_new(group, send=lambda: sender.report(store_ports=(1,)))
    await recovers(brief, job, 2)
    await reset(group, reapply=reapply)
    await has_nodes(group, {0: 1, 1: 2})
    await trains_on(brief, job, generation=2, incarnation=3)


@pytest.mark.long("workflows")
@HANDED
async def test_a_node_is_replaced_although_its_group_is_reset_meanwhile(fleet: Fleet, reapply: bool):
    job, group = await started(fleet)
    middle = (await tasks(group))[-1]
    fleet.endless.add(1)
    await fleet.lose(await node(fleet, job, 1))
    await until(job, lambda s: s.phase is not JobPhase.RUNNING)
    fleet.endless.clear()
    await reset(group, to=middle, reapply=reapply)
    await node(fleet, job, 1, 2)
    await until(job, lambda s: s.phase is JobPhase.RUNNING and s.nodes == 2 and s.generation == 2)
    await trains_on(fleet, job, generation=2, incarnation=3)


async def has_nodes(group: Handle, incarnations: dict[int, int]) -> None:
    """The group holds the leases of these incarnations."""

    async def holds() -> bool:
        views = await group.query("nodes", result_type=list[NodeView])
        return {one.rank: one.incarnation for one in views} == incarnations

    await seen(group, holds, what=f"{group.id} has the nodes {incarnations}")
