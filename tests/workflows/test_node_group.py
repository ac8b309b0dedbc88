"""Tests of groups in special situations: continue-as-new, and a server that is away."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.contract import JobPhase, ScaleRequest
from perdure.workflows import options
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.flood import flood, reports
from tests.workflows.jobs import (
    history_length,
    incidents,
    node,
    running,
    settled_history,
    status,
    until,
)
from tests.workflows.played_node import now
from tests.workflows.ways import also_replayed

LONG_OUTAGE_S = 12
SILENT_WITHIN_S = 7
"""Seconds in which a lease of `SHORT_LEASE` ends, is not taken again, and that is reported."""
SHORT_LEASE = {"heartbeat": "1s", "timeout": "3s", "schedule_to_start": "1s"}


def continue_after(events: int) -> tuple[str, ...]:
    """Server options: a run should continue as new after this many events."""
    return ("--dynamic-config-value", f"limit.historyCount.suggestContinueAsNew={events}")


@also_replayed
async def test_a_node_that_is_lost_is_leased_no_more_and_is_not_called_unreachable(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    [group_id] = (await running(handle, nodes=2)).groups
    lost = await node(fleet, handle, 1)
    await eventually(lambda: bool(lost.lease_epochs), what="a lease is held")
    await fleet.lose(lost)
    await running(handle, nodes=2, generation=2)
    events = fleet.client.get_workflow_handle(group_id).fetch_history_events()
    scheduled = [event.activity_task_scheduled_event_attributes async for event in events]
    told = b"".join(payload.data for one in scheduled for payload in one.input.payloads)
    assert [one.activity_id for one in scheduled if one.activity_id.startswith("lease/1/1/")] == ["lease/1/1/1"]
    assert (b'"LOST"' in told, b'"UNREACHABLE"' in told) == (True, False)


@pytest.mark.long("workflows")
async def test_no_signal_is_lost_when_a_group_continues_as_new():
    async with dev_server(options=continue_after(250)) as server:
        flooded = await flood(await server.client(), nodes=20, signals_per_node=75)
    assert flooded.runs > 3
    assert flooded.signals_sent == 1500
    assert flooded.heard == flooded.sent, "every signal's edge, once, and in order per node"


@pytest.mark.long("workflows")
async def test_leases_are_held_again_after_continue_as_new():
    async with dev_server(options=continue_after(400)) as server, running_fleet(await server.client()) as fleet:
        handle = await submit(fleet, job_spec("24"))
        known = await running(handle, nodes=24)
        nodes = [await node(fleet, handle, rank) for rank in range(24)]
        group = fleet.client.get_workflow_handle(known.groups[0])
        before = {played.rank: played.lease_epochs[-1] for played in nodes}
        run_id = (await group.describe()).run_id
        while (await group.describe()).run_id == run_id:
            await reports(nodes)
        await eventually(lambda: all(played.lease_epochs[-1] > before[played.rank] for played in nodes))
        known = await status(handle)
        assert (known.phase, known.generation) == (JobPhase.RUNNING, 1)
        assert not await incidents(handle)


async def test_a_job_at_rest_writes_no_history(fleet: Fleet):
    handle = await submit(fleet, job_spec("2", timing={"lease": SHORT_LEASE}))
    await running(handle, nodes=2)
    before = await settled_history(handle)
    group = fleet.client.get_workflow_handle((await status(handle)).groups[0])
    group_before = await settled_history(group)
    for _ in range(4):
        await leases_renewed(group, since=now(), leases=2)
    assert await history_length(handle) == before
    assert await history_length(group) == group_before


async def test_a_node_that_came_and_went_before_the_watch_looked_is_replaced(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(options, "OVERLOOKED", timedelta(seconds=2))
    async with running_fleet(temporal_client) as fleet:
        fleet.unseen = {1}
        handle = await submit(fleet, job_spec("2"))
        await running(handle, nodes=2)
        assert {rank: incarnation for _, rank, incarnation in fleet.nodes} == {0: 1, 1: 2}
        assert fleet.watches == 2, "begun again once, and it reported all others"


async def test_a_job_ends_although_the_watch_has_not_reported_its_nodes(fleet: Fleet):
    fleet.unwatched = {1}
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    for rank in range(2):
        await (await node(fleet, handle, rank)).finish()
    assert (await handle.result())["phase"] == "SUCCEEDED"
    assert len(fleet.deleted) == 2


async def test_what_the_watch_says_before_the_node_s_maker_has_answered_is_heard(fleet: Fleet):
    fleet.told_early = dict.fromkeys(range(2), "no machine can take it")
    handle = await submit(fleet, job_spec("2"))
    known = await until(handle, lambda s: s.phase is JobPhase.WAITING)
    assert "no machine can take it" in known.reason
    await handle.execute_update("scale", ScaleRequest(nodes="1"))
    await eventually(lambda: len(fleet.deleted) == 1)


async def test_a_watch_that_died_misses_nothing_that_its_group_knows(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    fleet.withhold_events = True
    await fleet.lose(await node(fleet, handle, 1))
    fleet.watches_die.set()
    await eventually(lambda: fleet.watches > 1)
    fleet.watches_die.clear()
    await node(fleet, handle, 1, incarnation=2)
    await running(handle, nodes=2)


async def test_a_survivor_that_is_silent_for_a_while_is_there_when_the_replacement_comes(fleet: Fleet):
    timing = {"lease": SHORT_LEASE, "processes": {"presumed_gone": "10m"}}
    handle = await submit(fleet, job_spec("2", timing=timing))
    await running(handle, nodes=2)
    survivor = await node(fleet, handle, 0)
    fleet.pending[1] = "no free slot"
    await fleet.lose(await node(fleet, handle, 1))
    replacement = await node(fleet, handle, 1, incarnation=2)
    # The lease of a machine that broke the world would have ended by now.
    await asyncio.sleep(SILENT_WITHIN_S)
    await survivor.die()
    await until(handle, lambda s: s.unreachable == (0,))
    await survivor.restart()
    await until(handle, lambda s: not s.unreachable)
    fleet.pending.clear()
    await replacement.start()
    await running(handle, nodes=2, generation=2)
    assert fleet.node(handle.id, 0) is survivor


@pytest.mark.long("workflows")
async def test_a_server_that_is_away_for_long_costs_no_node():
    async with dev_server() as server, running_fleet(await server.client()) as fleet:
        handle = await submit(fleet, job_spec("24", timing={"lease": SHORT_LEASE}))
        known = await running(handle, nodes=24)
        nodes = [await node(fleet, handle, rank) for rank in range(24)]
        await eventually(lambda: all(played.lease_epochs for played in nodes))
        server.kill()
        # By now agents ask for the server every few seconds only, and a lease does not wait that long for its agent.
        await asyncio.sleep(LONG_OUTAGE_S)
        await server.start()
        back = now()
        group = fleet.client.get_workflow_handle(known.groups[0])
        await leases_renewed(group, since=back, leases=24)
        known = await until(handle, lambda s: not s.unreachable)
        assert (known.phase, known.generation, known.restarts) == (JobPhase.RUNNING, 1, 0)
        assert not fleet.deleted
        assert {incarnation for _, _, incarnation in fleet.nodes} == {1}
        # A busy machine may be slow to renew them all: that is observed, and interrupts nothing.
        assert all(incident.observation for incident in await incidents(handle))


async def leases_renewed(group: WorkflowHandle[Any, Any], *, since: datetime, leases: int) -> None:
    """Returns once the server has had a heartbeat of so many leases since then."""

    async def renewed() -> bool:
        pending = (await group.describe()).raw_description.pending_activities
        held = [one.last_heartbeat_time.ToDatetime(UTC) for one in pending if one.activity_type.name == "hold_lease"]
        return sum(beat > since for beat in held) >= leases

    await eventually(renewed, what=f"{leases} leases are renewed")
