"""Tests of jobs whose nodes join by themselves, on a real server: slots, their tokens, and leaving."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from perdure.contract import (
    FailureClass,
    JobPhase,
    Joined,
    JoinRefusal,
    JoinRequest,
    NodeView,
    ScaleRequest,
)
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import incidents, running, seen, settled_history, status, until
from tests.workflows.joiners import WAITING, Job, JoiningNode, ask, asks, join, joined_spec
from tests.workflows.ways import AS_WORKERS_DO, replayed


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, temporal_client: Client) -> AsyncIterator[Fleet]:
    """Opens places, and starts nothing by itself."""
    async with running_fleet(temporal_client, **getattr(request, "param", AS_WORKERS_DO)) as fleet:
        fleet.pending = dict.fromkeys(range(8), WAITING)
        yield fleet


async def refused(job: Job, request: JoinRequest) -> str | None:
    with pytest.raises(WorkflowUpdateFailedError) as raised:
        await ask(job, request)
    assert isinstance(raised.value.cause, ApplicationError)
    return raised.value.cause.type


@replayed
async def test_machines_join_train_and_are_released(fleet: Fleet):
    job = await submit(fleet, joined_spec("2"))
    known = await until(job, lambda s: "perdure join" in s.next_action)
    assert known.phase is JobPhase.STARTING
    nodes = [await join(fleet, job, asks(name)) for name in ("a", "b")]
    await running(job, nodes=2)
    for played in nodes:
        await played.finish()
    result = await job.result()
    assert (result["phase"], result["exit_code"]) == ("SUCCEEDED", 0)
    assert [played.completed for played in nodes] == [1, 1]
    assert all(played.stopped for played in nodes)


async def test_who_comes_again_is_back_at_once(fleet: Fleet):
    # No lease and no command that lapses can tell of the loss while the test lasts.
    patient = {
        "lease": {"timeout": "1h", "schedule_to_start": "1h"},
        "commands": {"schedule_to_start": "1h"},
        "rendezvous": {"last_call": "200ms"},
    }
    job = await submit(fleet, joined_spec("2", timing=patient))
    _, lost = [await join(fleet, job, asks(name)) for name in ("a", "b")]
    await running(job, nodes=2)
    await lost.die()
    back = await join(fleet, job, asks("b", 2))
    await running(job, nodes=2, generation=2)
    (incident,) = await incidents(job)
    assert (incident.failure, incident.culprit) == (FailureClass.NODE_LOST, 1)
    assert (back.rank, back.incarnation) == (1, 2)


async def test_a_departure_notice_opens_the_place_at_once_with_its_reason(fleet: Fleet):
    job = await submit(fleet, joined_spec("1:2"))
    _, leaving = [await join(fleet, job, asks(name)) for name in ("a", "b")]
    await running(job, nodes=2)
    await fleet.lose(leaving, "`perdure join` on b got SIGTERM")
    known = await running(job, nodes=1)
    assert "perdure join" in known.next_action
    (lost,) = (one for one in await incidents(job) if one.failure is FailureClass.NODE_LOST)
    assert "got SIGTERM" in lost.evidence[0].text
    await join(fleet, job, asks("c"))
    await running(job, nodes=2)


async def test_refusals_are_typed_and_make_no_history(fleet: Fleet):
    job = await submit(fleet, joined_spec("1"))
    await join(fleet, job, asks("a"))
    await running(job, nodes=1)
    before = await settled_history(job)
    for _ in range(5):
        assert await refused(job, asks("b")) == JoinRefusal.NO_PLACE
    assert await refused(job, asks("a", 2, command=("true",))) == JoinRefusal.OTHER_COMMAND
    assert await refused(job, asks("a", 2, role="evaluator")) == JoinRefusal.UNKNOWN_ROLE
    assert (await job.describe()).history_length == before


async def test_other_backends_are_not_joined(fleet: Fleet):
    job = await submit(fleet, job_spec("1"))
    assert await refused(job, asks("a")) == JoinRefusal.OTHER_BACKEND


async def test_a_machine_that_is_no_longer_desired_is_released(fleet: Fleet):
    job = await submit(fleet, joined_spec("1:2"))
    nodes = [await join(fleet, job, asks(name)) for name in ("a", "b")]
    await running(job, nodes=2)
    await job.execute_update("scale", ScaleRequest(nodes="1"))
    await running(job, nodes=1)
    await eventually(lambda: nodes[1].stopped)
    assert not nodes[0].stopped


@pytest.mark.long("workflows")
async def test_a_machine_whose_place_closed_before_its_agent_reported_is_released(fleet: Fleet):
    job = await submit(fleet, joined_spec("1:2"))
    first = await join(fleet, job, asks("a"))
    await running(job, nodes=1)
    answer = await ask(job, asks("b"))
    assert answer.node is not None
    late = JoiningNode(fleet, answer.node)
    fleet.started(late)
    await job.execute_update("scale", ScaleRequest(nodes="1"))
    await eventually(lambda: bool(fleet.deleted))
    await late.start()
    await eventually(lambda: late.stopped)
    assert not first.stopped


@pytest.mark.long("workflows")
async def test_a_machine_that_was_cut_off_while_its_place_was_given_away_is_released_when_it_is_back(fleet: Fleet):
    job = await submit(fleet, joined_spec("2"))
    _, cut_off = [await join(fleet, job, asks(name)) for name in ("a", "b")]
    await running(job, nodes=2)
    await fleet.lose(cut_off)
    await until(job, lambda known: "perdure join" in known.next_action)
    await join(fleet, job, asks("c"))
    await running(job, nodes=2, generation=2)
    await eventually(lambda: any(f"-1-{cut_off.request.node.uid}1" in name for name in fleet.deleted))
    await cut_off.serve()
    await cut_off.join_again()
    await eventually(lambda: cut_off.stopped)


async def test_where_a_machine_keeps_its_log_is_known_from_its_agent(fleet: Fleet):
    job = await submit(fleet, joined_spec("1"))
    node = await join(fleet, job, asks("a"))
    await node.to_group("joined", Joined, agent_started_at=node.started_at, address="10.0.0.1", log_path="/x.log")
    group = fleet.client.get_workflow_handle((await status(job)).groups[0])

    async def known() -> list[NodeView]:
        views = await group.query("nodes", result_type=list[NodeView])
        return [view for view in views if view.log_path]

    views = await seen(group, known)
    assert views[0].log_path == "/x.log"
