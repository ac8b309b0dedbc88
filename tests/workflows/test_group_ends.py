"""Tests that a group that ends while its job runs is detected and restarted."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle

from perdure.contract import JobPhase
from perdure.workflows import options
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import continue_as_new, node, running, status, until
from tests.workflows.played_node import PlayedNode

LIMIT = 250
"""Events of a run, from the first one on: a replay under another limit than before would make other commands."""

Handle = WorkflowHandle[Any, Any]


async def end(fleet: Fleet, handle: Handle) -> Handle:
    """Terminates the job's only group, and returns its handle."""
    group = fleet.client.get_workflow_handle((await status(handle)).groups[0])
    await group.terminate("by hand")
    return group


async def started_again(group: Handle) -> None:
    async def runs() -> bool:
        return (await group.describe()).status is WorkflowExecutionStatus.RUNNING

    await eventually(runs, what="the group runs again")


async def forget_leases(nodes: list[PlayedNode]) -> None:
    """So that each lease seen from now on is a new one."""
    for played in nodes:
        await eventually(lambda played=played: bool(played.lease_epochs), what="a lease is held")
        played.lease_epochs.clear()


async def leased_again(nodes: list[PlayedNode]) -> None:
    for played in nodes:
        await played.join_again()
    await eventually(lambda: all(played.lease_epochs for played in nodes), what="leases are held again")


async def test_a_terminated_group_is_started_again_leases_its_nodes_at_once_and_sees_an_agent_die(
    temporal_client: Client,
):
    async with running_fleet(temporal_client) as fleet:
        spec = job_spec("2", timing={"lease": {"heartbeat": "1s", "timeout": "3s", "schedule_to_start": "1s"}})
        handle = await submit(fleet, spec)
        await running(handle, nodes=2)
        nodes = [await node(fleet, handle, rank) for rank in range(2)]
        await forget_leases(nodes)
        await end(fleet, handle)
        await eventually(lambda: all(played.lease_epochs for played in nodes), what="leases are held again")
        await nodes[1].die()
        known = await until(handle, lambda s: s.unreachable == (1,))
        assert (known.phase, known.generation) == (JobPhase.RUNNING, 1)
        assert len(fleet.nodes) == 2, "no node was created again"


@pytest.mark.long("workflows")
async def test_a_group_that_is_no_child_of_the_jobs_run_is_started_again_when_an_agent_misses_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(options, "HISTORY_LIMIT", LIMIT)
    async with dev_server() as server, running_fleet(await server.client()) as fleet:
        handle = await submit(fleet, job_spec("2"))
        await running(handle, nodes=2)
        nodes = [await node(fleet, handle, rank) for rank in range(2)]
        handle = fleet.client.get_workflow_handle(handle.id)
        await continue_as_new(handle, lambda: nodes[0].rank_dies(sequence=1))
        await running(handle, nodes=2)
        await forget_leases(nodes)
        group = await end(fleet, handle)
        await nodes[0].miss_group()
        await started_again(group)
        await leased_again(nodes)


@pytest.mark.long("workflows")
async def test_a_group_that_winds_down_for_long_continues_as_new(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options, "HISTORY_LIMIT", LIMIT)
    async with dev_server() as server, running_fleet(await server.client()) as fleet:
        fleet.delete_nothing = True
        handle = await submit(fleet, job_spec("2"))
        known = await running(handle, nodes=2)
        played = await node(fleet, handle, 0)
        await handle.cancel()
        await until(handle, lambda s: s.phase is JobPhase.STOPPING)
        group = fleet.client.get_workflow_handle(known.groups[0])
        await continue_as_new(group, played.report)
        fleet.delete_nothing = False
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert len(fleet.deleted) >= 2


@pytest.mark.long("workflows")
async def test_a_job_with_an_open_incident_continues_as_new_before_the_server_refuses_signals(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(options, "HISTORY_LIMIT", LIMIT)
    async with dev_server() as server, running_fleet(await server.client()) as fleet:
        handle = await submit(fleet, job_spec("2"))
        handle = fleet.client.get_workflow_handle(handle.id)
        await running(handle, nodes=2)
        fleet.become_ready = False
        await fleet.lose(await node(fleet, handle, 1))
        await until(handle, lambda s: s.phase is JobPhase.WAITING)
        zero = await node(fleet, handle, 0)
        await continue_as_new(handle, lambda: zero.rank_dies(sequence=1, generation=0))
        await (await node(fleet, handle, 1, incarnation=2)).ready()
        known = await running(handle, nodes=2)
        assert known.last_incident is not None
        assert (known.last_incident.number, known.last_incident.culprit) == (1, 1)


async def test_a_member_that_refuses_a_world_is_asked_once(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        handle = await submit(fleet, job_spec("2"))
        await running(handle, nodes=2)
        zero, one = [await node(fleet, handle, rank) for rank in range(2)]
        one.leaving = True
        await zero.rank_dies()
        await eventually(lambda: one.refused > 0, what="the world is refused")
        for _ in range(10):
            await zero.report()
            await status(handle)
        assert one.refused == 1
        one.leaving = False
        await one.restart()
        await running(handle, nodes=2, generation=2)


async def test_a_job_that_may_not_delete_its_nodes_ends_nevertheless(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        spec = job_spec("1", backend="kubernetes")
        spec["roles"]["worker"]["image"] = "train:1"
        handle = await submit(fleet, spec)
        known = await running(handle, nodes=1)
        fleet.denies = True
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert not fleet.deleted
        name = (await node(fleet, handle, 0)).request.name
        assert fleet.denied == {name: 1, known.uid: 1}
        assert (await status(handle)).left == (f"node 0: {name} is left, as its deletion is denied: forbidden",)


async def test_a_node_that_may_not_be_deleted_is_deleted_once_that_is_allowed(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        fleet.denies = True
        handle = await submit(fleet, job_spec("2"))
        await running(handle, nodes=2)
        lost = await node(fleet, handle, 1)
        await fleet.lose(lost)
        await running(handle, nodes=2, generation=2)
        name = lost.request.name
        await eventually(lambda: fleet.denied.get(name, 0) > 1, what="its deletion is requested again")
        fleet.denies = False
        await eventually(lambda: name in fleet.deleted, what="it is deleted")
