"""Tests of one job on a real server: every request and every fault, with simulated nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError

from perdure.contract import (
    FailureClass,
    FailureKind,
    IncidentView,
    JobPhase,
    NodePhase,
    NodeView,
    PauseRequest,
    ReasonRequest,
    RelaunchRequest,
    ScaleRequest,
)
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import incidents, node, reset, running, seen, status, until
from tests.workflows.played_node import PlayedNode, now
from tests.workflows.ways import also_replayed, replayed, sandboxed


@replayed
async def test_a_killed_rank_restarts_in_place_and_the_job_runs_to_success(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    await (await node(fleet, handle, 1)).rank_dies()
    known = await running(handle, nodes=2, generation=2)
    assert known.restarts == 1

    async def commanded() -> IncidentView | None:
        incident = (await incidents(handle))[0]
        return incident if incident.commanded_at else None

    # The last acknowledgement may come after the first steps.
    incident = await seen(handle, commanded)
    assert incident.culprit == 1
    assert incident.stepping_at is not None
    nodes = [await node(fleet, handle, rank) for rank in range(2)]
    assert [w.generation for w in nodes[0].worlds] == [1, 2]
    for played in nodes:
        await played.finish()
    result = await handle.result()
    assert (result["phase"], result["exit_code"]) == ("SUCCEEDED", 0)
    assert [played.completed for played in nodes] == [2, 2]
    assert len(fleet.deleted) == 2


@replayed
async def test_a_rank_that_is_killed_at_each_start_is_restarted_after_a_pause_and_stops_its_job(fleet: Fleet):
    handle = await submit(fleet, job_spec("2", retry={"no_progress_limit": 2}))
    await running(handle, nodes=2)
    nodes = [await node(fleet, handle, rank) for rank in range(2)]
    for played in nodes:
        played.silent = True
    killed_at = now()
    for generation in range(2, 5):
        killed_at = now()
        await nodes[1].rank_dies()
        await seen(handle, taken(nodes[1], generation))
    assert now() - killed_at >= timedelta(seconds=5), "the pause before the second restart"
    await nodes[1].rank_dies()
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.details[0]["exit_code"] == 1
    assert "it ended the same way 3 times in a row" in failed.value.cause.message


def taken(played: PlayedNode, generation: int) -> Callable[[], Awaitable[bool]]:
    async def has_taken() -> bool:
        return played.generation == generation

    return has_taken


@also_replayed
async def test_a_lost_node_is_replaced(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    await fleet.lose(await node(fleet, handle, 1))
    await running(handle, nodes=2, generation=2)
    assert (await node(fleet, handle, 1, incarnation=2)).worlds[-1].generation == 2


@sandboxed
async def test_an_elastic_job_shrinks_and_grows_back(fleet: Fleet):
    handle = await submit(fleet, job_spec("1:2"))
    await running(handle, nodes=2)
    fleet.pending[1] = "no free slot"
    await fleet.lose(await node(fleet, handle, 1))
    known = await running(handle, nodes=1)
    assert "no free slot" in known.next_action
    fleet.pending.clear()
    await (await node(fleet, handle, 1, incarnation=2)).start()
    await running(handle, nodes=2)


async def test_an_agent_that_restarts_changes_nothing_and_one_that_dies_is_unreachable_until_it_is_back(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    played = await node(fleet, handle, 1)
    await played.restart()
    await eventually(lambda: len(played.lease_epochs) == 2)
    known = await status(handle)
    assert (known.generation, known.unreachable) == (1, ())
    await played.die()
    known = await until(handle, lambda s: s.unreachable == (1,))
    assert (known.phase, known.generation) == (JobPhase.RUNNING, 1)
    await played.restart()
    known = await until(handle, lambda s: not s.unreachable)
    assert (known.phase, known.generation) == (JobPhase.RUNNING, 1)
    assert len(fleet.nodes) == len({n.request.name for n in fleet.nodes.values()})
    assert not await incidents(handle)


@also_replayed
async def test_lease_and_peers_alone_lead_to_repair(fleet: Fleet):
    handle = await submit(fleet, job_spec("1:2"))
    await running(handle, nodes=2)
    fleet.withhold_events = True
    fleet.pending[1] = "no free slot"
    await fleet.lose(await node(fleet, handle, 1))
    await (await node(fleet, handle, 0)).rank_dies(signal=None, error="Connection closed by peer")
    await running(handle, nodes=1)
    incident = (await incidents(handle))[-1]
    assert incident.culprit == 1
    assert incident.failure == "NODE_UNRESPONSIVE"


@pytest.mark.long("workflows")
@also_replayed
async def test_a_node_that_does_not_enter_its_world_is_restarted_and_then_replaced(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    stuck = await node(fleet, handle, 1)
    stuck.silent = True
    for generation in (1, 2):
        await eventually(lambda generation=generation: stuck.generation == generation)
        await stuck.fail(kind=FailureKind.RENDEZVOUS, message=f"did not enter generation {generation}")
    await running(handle, nodes=2, generation=3)
    assert [world.members[1].restart_command for world in stuck.worlds] == [False, True]
    assert not any(world.members[0].restart_command for world in (await node(fleet, handle, 0)).worlds)
    assert (await node(fleet, handle, 1, incarnation=2)).worlds[-1].generation == 3
    (incident,) = await incidents(handle)
    assert (incident.failure, incident.culprit) == (FailureClass.RENDEZVOUS_TIMEOUT, 1)
    assert "did not enter two worlds in a row" in incident.title


@sandboxed
async def test_a_stall_is_shown_by_group_and_job_until_it_is_over(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    known = await running(handle, nodes=2)
    group = fleet.client.get_workflow_handle(known.groups[0])
    stuck, since = await node(fleet, handle, 1), now()
    await stuck.stall(since)
    await stuck.stall(since)
    known = await until(handle, lambda s: s.stalled == (1,))
    assert (known.phase, known.generation) == (JobPhase.RUNNING, 1)
    assert "no steps on node 1" in known.reason
    views = await group.query("nodes", result_type=list[NodeView])
    assert [view.stalled_since for view in views] == [None, since]
    await stuck.stall(None)
    await until(handle, lambda s: not s.stalled)
    [pause] = await incidents(handle)
    assert pause.observation is not None
    assert pause.observation.stalled == (1,)


@pytest.mark.long("workflows")
@also_replayed
async def test_scale_suspend_resume_restart_relaunch(fleet: Fleet):
    handle = await submit(fleet, job_spec("3"))
    await running(handle, nodes=3)
    await handle.execute_update("scale", ScaleRequest(nodes="2"))
    await running(handle, nodes=2)
    await handle.execute_update("scale", ScaleRequest(nodes="auto"))
    await running(handle, nodes=3)
    await handle.execute_update("restart", ReasonRequest(reason="new config"))
    await until(handle, lambda s: s.phase is JobPhase.RUNNING and s.generation == 4)
    await handle.execute_update("relaunch_node", RelaunchRequest(rank=0))
    await until(handle, lambda s: s.phase is JobPhase.RUNNING and s.generation >= 5 and s.nodes == 3)
    await handle.execute_update("suspend", ReasonRequest())
    await until(handle, lambda s: s.phase is JobPhase.SUSPENDED)
    await handle.execute_update("resume", ReasonRequest())
    known = await running(handle, nodes=3)
    assert known.restarts == 0


@pytest.mark.long("workflows")
@replayed
async def test_a_relaunched_node_enters_no_world_before_the_old_one_has_ended(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    fleet.may_end.clear()
    await handle.execute_update("relaunch_node", RelaunchRequest(rank=0, role="worker"))
    known = await until(handle, lambda s: "node 0: waits until incarnation 1 has ended" in s.reason)
    assert (known.phase, known.generation) == (JobPhase.WAITING, 1)
    fleet.may_end.set()
    await running(handle, nodes=2, generation=2)
    old = fleet.nodes[handle.id, 0, 1]
    assert [world.generation for world in old.worlds] == [1]


@also_replayed
async def test_a_node_that_does_not_get_to_the_others_is_left_out_until_it_does(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    fleet.cut_off = {2: "127.0.0.1 port 30000 does not answer"}
    await handle.execute_update("scale", ScaleRequest(nodes="2:3"))
    known = await until(handle, lambda s: bool(s.warnings))
    assert known.warnings == ("node 2 is left out of the world: 127.0.0.1 port 30000 does not answer",)
    assert (known.phase, known.nodes, known.generation) == (JobPhase.RUNNING, 2, 1)
    world = (await node(fleet, handle, 0)).worlds[-1]
    asked = (await node(fleet, handle, 2)).asked_to_connect[0]
    assert (asked.address, asked.port) == (world.store_address, world.store_port)
    fleet.cut_off = {}
    assert not (await running(handle, nodes=3, generation=2)).warnings


@sandboxed
async def test_nodes_are_seen_by_group_and_job_and_requests_that_cannot_be_granted_are_refused(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    known = await running(handle, nodes=2)
    views = await handle.query("nodes", result_type=list[NodeView])
    assert [(v.rank, v.phase, v.group_rank) for v in views] == [(0, NodePhase.READY, 0), (1, NodePhase.READY, 1)]
    group = fleet.client.get_workflow_handle(known.groups[0])
    of_group = await group.query("nodes", result_type=list[NodeView])
    assert [v.rank for v in of_group] == [0, 1]
    assert all(not v.token for v in of_group)
    refusals: list[tuple[str, Any, str]] = [
        ("scale", ScaleRequest(nodes="zero"), 'nodes: got "zero"'),
        ("scale", ScaleRequest(nodes="4:2"), "min is 4 and max is 2"),
        ("scale", ScaleRequest(nodes="2", role="ps"), 'role: got "ps"'),
        ("scale", ScaleRequest(nodes="2", resources={"gpu": "2"}), 'got "gpu"; of a job that runs, only'),
        ("scale", ScaleRequest(nodes="2", resources={"cpu": "lots"}), 'resources.cpu: got "lots"'),
        ("scale", ScaleRequest(nodes="2", resources={"cpu": "4"}), "nodes of the backend local request none"),
        ("relaunch_node", RelaunchRequest(rank=0, resources={"memory": "0"}), 'resources.memory: got "0"'),
        ("resume", ReasonRequest(), "not suspended"),
        ("resume_repairs", ReasonRequest(), "repairs are not paused"),
        ("pause_repairs", PauseRequest(duration=timedelta(days=8)), "the longest is 7 days"),
        ("pause_repairs", PauseRequest(duration=timedelta(0)), "duration: got 0s"),
        ("relaunch_node", RelaunchRequest(rank=9), "rank: got 9; this job has the nodes 0, 1"),
        ("relaunch_node", RelaunchRequest(rank=0, role="ps"), 'role: got "ps"; this job has the role "worker"'),
    ]
    for update, request, says in refusals:
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update(update, request)
        assert says in str(refused.value.cause)


@pytest.mark.long("workflows")
@replayed
async def test_repairs_are_paused_until_their_time_is_over_or_a_user_resumes_them(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    for seconds in (0.5, 3600):
        await handle.execute_update("pause_repairs", PauseRequest(duration=timedelta(seconds=seconds), reason="gdb"))
        if seconds > 1:
            known = await status(handle)
            assert known.repairs_paused_until is not None
            assert "(gdb)" in known.warnings[0]
            await handle.execute_update("resume_repairs", ReasonRequest())
        await until(handle, lambda s: s.repairs_paused_until is None and not s.warnings)


@also_replayed
async def test_cancel_winds_down_first_and_says_what_is_left(fleet: Fleet):
    fleet.left = {1: "its machine does not answer"}
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    assert isinstance(failed.value.cause, CancelledError)
    assert len(fleet.deleted) == 2
    known = await status(handle)
    assert known.phase is JobPhase.CANCELLED
    assert known.left == ("node 1: its machine does not answer",)


@replayed
async def test_cancel_during_rendezvous(fleet: Fleet):
    fleet.become_ready = False
    handle = await submit(fleet, job_spec("2"))
    await node(fleet, handle, 1)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert len(fleet.deleted) == 2


@pytest.mark.long("workflows")
async def test_suspend_during_recovery(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    fleet.become_ready = False
    await fleet.lose(await node(fleet, handle, 1))
    await until(handle, lambda s: s.phase is JobPhase.WAITING)
    await handle.execute_update("suspend", ReasonRequest())
    fleet.become_ready = True
    await handle.execute_update("resume", ReasonRequest())
    await running(handle, nodes=2)


@pytest.mark.long("workflows")
async def test_a_failed_job_says_why_once(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    for generation in range(1, 5):
        await running(handle, nodes=2, generation=generation)
        await (await node(fleet, handle, 0)).rank_dies(signal=None, error="ValueError: no data")
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    error = failed.value.cause
    assert isinstance(error, ApplicationError)
    assert error.type == "JobFailed"
    assert error.details[0]["exit_code"] == 1
    assert "no progress over 3 restarts" in error.message


async def test_a_wrong_spec_fails_once_with_the_same_text(fleet: Fleet):
    spec = job_spec("2")
    spec["roles"]["worker"]["nodes"] = {"min": 3, "max": 2}
    spec["rols"] = {}
    handle = await submit(fleet, spec)
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    error = failed.value.cause
    assert isinstance(error, ApplicationError)
    assert error.type == "InvalidSpec"
    assert "rols: unknown field" in error.message
    assert "roles.worker.nodes" in error.message


@sandboxed
async def test_signals_twice_out_of_order_and_of_older_incarnations(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    zero, one = await node(fleet, handle, 0), await node(fleet, handle, 1)
    await one.rank_dies(sequence=12)
    await running(handle, nodes=2, generation=2)
    await one.rank_dies(sequence=12, generation=2)
    await one.rank_dies(sequence=5, generation=1)
    await fleet.lose(one)
    await running(handle, nodes=2, generation=3)
    await one.rank_dies(sequence=40, generation=3)
    await zero.fail(kind="RANKS", sender=zero.request.node.model_copy(update={"token": "guess"}), generation=3)
    known = await status(handle)
    assert known.generation == 3
    assert known.phase is JobPhase.RUNNING


async def test_an_older_incarnation_that_speaks_is_told_to_stop(fleet: Fleet):
    handle = await submit(fleet, job_spec("1:2"))
    await running(handle, nodes=2)
    old = await node(fleet, handle, 1)
    await fleet.lose(old)
    await node(fleet, handle, 1, incarnation=2)
    await running(handle, nodes=2)
    await old.restart()
    await eventually(lambda: old.stopped)
    assert (await status(handle)).phase is JobPhase.RUNNING


@also_replayed
async def test_terminated_job_groups_wind_down_and_the_name_can_be_used_again(fleet: Fleet):
    spec = job_spec("1")
    handle = await submit(fleet, spec)
    await running(handle, nodes=1)
    group = fleet.client.get_workflow_handle((await status(handle)).groups[0])
    await handle.terminate("by hand")
    again = await submit(fleet, spec)
    await until(again, lambda s: s.phase is JobPhase.RUNNING)
    await group.result()
    first_uid = group.id.split("/")[3]
    assert first_uid != (await status(again)).uid
    assert sum(first_uid in name for name in fleet.deleted) == 1
    known = await status(again)
    assert (known.phase, known.generation) == (JobPhase.RUNNING, 1)


@also_replayed
async def test_reset_adopts_the_nodes(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    await (await node(fleet, handle, 1)).rank_dies()
    await running(handle, nodes=2, generation=2)
    await reset(handle)
    known = await until(handle, lambda s: s.phase is JobPhase.RUNNING and s.generation >= 3)
    assert known.nodes == 2
    assert not fleet.deleted
    assert {key[2] for key in fleet.nodes if key[0] == handle.id} == {1}, "no node was created again"


async def test_min_not_reached_is_waiting_with_the_reason(fleet: Fleet):
    fleet.pending[1] = "no free slot: 1 of 1 in use"
    handle = await submit(fleet, job_spec("2", timing={"rendezvous": {"join_timeout": "2s"}}))
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    assert "no free slot" in str(failed.value.cause)
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.details[0]["exit_code"] == 3


@pytest.mark.long("workflows")
@also_replayed
async def test_many_nodes_are_created_together_and_what_is_missing_then_by_itself(fleet: Fleet):
    fleet.alone = {3, 5}
    handle = await submit(fleet, job_spec("10"))
    await running(handle, nodes=10)
    assert fleet.together == [tuple(range(10))]
    assert sorted(rank for _, rank, _ in fleet.nodes) == list(range(10))
    # A few that were lost are asked for one by one.
    for rank in (1, 2):
        await fleet.lose(await node(fleet, handle, rank))
    await until(handle, lambda s: s.phase is JobPhase.RUNNING and s.nodes == 10 and s.generation > 1)
    assert len(fleet.together) == 1


async def test_one_of_many_that_is_refused_ends_the_job(fleet: Fleet):
    fleet.refused = {7: "no such image"}
    handle = await submit(fleet, job_spec("10"))
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    assert "no such image" in str(failed.value.cause)
    assert len(fleet.deleted) == 10, "what was refused may have been made by an earlier attempt"


async def test_a_node_that_is_being_made_is_deleted_after_that(fleet: Fleet):
    fleet.endless = {1}
    handle = await submit(fleet, job_spec("1:2"))
    await running(handle, nodes=1)
    await handle.execute_update("scale", ScaleRequest(nodes="1"))
    await eventually(lambda: bool(fleet.deleted))
    assert not fleet.deleted_too_early


@replayed
async def test_a_refused_node_ends_the_job(fleet: Fleet):
    fleet.refused[0] = "workdir.path: no such folder: /nowhere"
    handle = await submit(fleet, job_spec("1"))
    with pytest.raises(WorkflowFailureError) as failed:
        await handle.result()
    assert "no such folder" in str(failed.value.cause)
