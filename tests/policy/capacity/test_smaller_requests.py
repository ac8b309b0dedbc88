"""Tests of nodes that no machine has room for, and that may request less."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli import text
from perdure.contract import JobPhase, JobStatus, Peaks, Progress, RoomSeen, SmallerRequest
from perdure.contract.transitions import NodeCreated, NodeLost, NodePending
from perdure.spec.errors import SpecError
from perdure.spec.validate import parse_spec
from perdure.workflows.policy.facts.events import RelaunchRequested, ScaleRequested
from perdure.workflows.policy.record.projections import status_of
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import Scenario

GI = 2**30
NO_CPU = "no machine can take it (Unschedulable: 0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2)"
NO_ROOM = "no machine can take it (Unschedulable: 0/2 nodes are available: 1 Insufficient memory, 2 Insufficient cpu.)"
NO_GPU = "no machine can take it (Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.)"
TAINTED = "no machine can take it (Unschedulable: 0/2 nodes are available: 2 node(s) had untolerated taint(s).)"
MINUTE = timedelta(minutes=1)


def pods(relax: dict[str, Any] | None, nodes: str = "2", **scaling: Any) -> Scenario:
    fields: dict[str, Any] = {"nodes": nodes, "command": ["torchrun", "train.py"], "image": "x"}
    fields["resources"] = {"cpu": 64, "memory": "256Gi"}
    fields["scaling"] = scaling if relax is None else {"relax": relax, **scaling}
    return Scenario(backend="kubernetes", roles={"worker": fields})


def waits(job: Scenario, *ranks: int, why: str = NO_CPU) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodePending, detail=why, queued=True)
    return job


def status(job: Scenario) -> JobStatus:
    return status_of(job.state, job.job, groups=(), phase=JobPhase.WAITING, now=job.now)


def used(job: Scenario, *, cpu: float, hours: float = 2) -> Scenario:
    """A node was seen to use so much, and is lost."""
    peaks = Peaks(watched=hours * 3600, cpu=cpu, memory=20 * GI)
    return job.rank_killed(1, progress=Progress(step=5, generation=1, generation_steps=5, peaks=peaks))


def test_nodes_that_no_machine_has_room_for_are_requested_again_with_less():
    job = waits(pods({"cpu": 8}), 0, 1).wait(MINUTE - timedelta(seconds=1))
    assert [job.node(rank).incarnation for rank in (0, 1)] == [1, 1]
    job.wait(1)
    assert [(job.node(rank).incarnation, job.node(rank).cpu, job.node(rank).memory) for rank in (0, 1)] == [
        (2, "8", None),
        (2, "8", None),
    ]
    [desire] = desires_of(job.state).values()
    assert {rank: node.cpu for rank, node in desire.nodes.items()} == {0: "8", 1: "8"}
    [entry] = job.state.incidents
    assert entry.observation is not None
    assert entry.observation.smaller_requests
    assert entry.title == "new nodes request 8 instead of 64 of cpu: no machine has room for more"
    assert entry.evidence[0].text == f"node 0: {NO_CPU}"
    assert status(job).requests == {"cpu": "8", "memory": "256Gi"}


def test_both_resources_are_relaxed_where_both_are_short():
    job = waits(pods({"cpu": "500m", "memory": "32Gi"}), 0, why=NO_ROOM).wait(MINUTE)
    assert (job.node(0).cpu, job.node(0).memory) == ("500m", 32 * GI)
    assert job.node(1).incarnation == 1, "it has not reported a lack"


@pytest.mark.parametrize("why", [NO_GPU, TAINTED, "its queue has not admitted it (SchedulingGated)"])
def test_a_node_that_waits_for_something_else_keeps_its_request(why: str):
    job = waits(pods({"cpu": 8, "memory": "32Gi"}), 0, 1, why=why).wait(10 * MINUTE)
    assert [job.node(rank).incarnation for rank in (0, 1)] == [1, 1]
    assert status(job).smaller == ()


def test_a_resource_that_may_not_be_relaxed_keeps_its_request():
    job = waits(pods({"memory": "32Gi"}), 0, 1).wait(10 * MINUTE)
    assert job.node(0).incarnation == 1
    [found] = status(job).smaller
    assert (found.resource, found.enough, found.relaxes) == ("cpu", "", False)


def test_a_machine_that_comes_in_time_ends_the_wait_for_less():
    job = waits(pods({"cpu": 8}), 0, 1).wait(MINUTE / 2)
    for rank in (0, 1):
        job.transition(rank, NodeCreated)
    job.ready(0, 1).steps().wait(10 * MINUTE)
    assert [job.node(rank).incarnation for rank in (0, 1)] == [1, 1]
    assert job.state.short_since is None


def test_nothing_is_relaxed_twice():
    job = waits(pods({"cpu": 8}), 0, 1).wait(MINUTE)
    waits(job, 0, 1).wait(100 * MINUTE)
    assert [job.node(rank).incarnation for rank in (0, 1)] == [2, 2]
    assert len(job.state.incidents) == 1
    [found] = status(job).smaller
    assert (found.requested, found.enough) == ("8", "")


def test_a_node_requests_no_less_than_one_was_seen_to_use():
    job = used(pods({"cpu": 8}, "1:2").running(), cpu=20.0, hours=0.01)
    job.transition(1, NodeLost, detail="its machine was removed")
    waits(job, 1).wait(MINUTE)
    assert job.node(1).cpu == "23"


def test_memory_that_was_raised_after_a_kill_is_not_relaxed():
    job = pods({"memory": "32Gi"}, memory_max="1Ti").running()
    job.transition(0, NodeLost, detail="it ran out of memory", out_of_memory=True)
    waits(job, 0, why=NO_ROOM).wait(5 * MINUTE)
    assert job.node(0).memory == 384 * GI


def test_without_relax_the_smaller_request_is_only_named():
    job = used(pods(None, "1:2").running(), cpu=3.0)
    job.transition(1, NodeLost, detail="its machine was removed")
    waits(job, 1).wait(5 * MINUTE)
    assert job.node(1).cpu is None
    assert status(job).smaller == (
        SmallerRequest(resource="cpu", requested="64", enough="4", measured=True, nodes=(1,)),
    )


def test_what_was_seen_for_minutes_does_not_say_how_little_would_do():
    job = used(pods(None, "1:2").running(), cpu=3.0, hours=0.1)
    job.transition(1, NodeLost, detail="its machine was removed")
    assert [one.enough for one in status(waits(job, 1)).smaller] == [""]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            SmallerRequest(resource="cpu", requested="64", enough="4", measured=True, nodes=(1,)),
            (
                "cpu: no machine has room for 64, as node 1 requests; 4 would do, by what nodes have used: set "
                "resources.cpu, or scaling.relax.cpu"
            ),
        ),
        (
            SmallerRequest(resource="memory", requested="256Gi", enough="32Gi", relaxes=True, nodes=tuple(range(9))),
            (
                "memory: no machine has room for 256Gi, as node 0, 1, 2, 3, ... requests; 32Gi would do, by "
                "scaling.relax: requested soon"
            ),
        ),
        (
            SmallerRequest(resource="cpu", requested="64", nodes=(0,)),
            (
                "cpu: no machine has room for 64, as node 0 requests; `scaling: {relax: {cpu: LEAST}}` has nodes "
                "request less where less will do"
            ),
        ),
    ],
)
def test_a_user_is_told_the_smaller_request(found: SmallerRequest, words: str):
    assert text.smaller(found) == words


@pytest.mark.parametrize(
    ("relax", "words"),
    [
        ({"cpu": 64}, r"scaling.relax.cpu is 64, and resources.cpu is 64; set it to less"),
        ({"memory": "1Ti"}, r"scaling.relax.memory is 1Ti, and resources.memory is 256Gi"),
        ({"cpu": 0}, "cpu is 0; expected more than 0"),
        ({}, "neither cpu nor memory is given"),
        ({"cpu": 4, "after": "0s"}, "after"),
    ],
)
def test_a_bound_that_relaxes_nothing_is_refused(relax: dict[str, Any], words: str):
    role = {"nodes": 1, "command": ["x"], "image": "x", "resources": {"cpu": 64, "memory": "256Gi"}}
    with pytest.raises(SpecError, match=words):
        parse_spec({"name": "job", "backend": "kubernetes", "roles": {"worker": {**role, "scaling": {"relax": relax}}}})


def test_new_nodes_request_what_a_user_says_and_others_keep_what_they_have():
    job = pods(None, "1:4").ready(0, 1, 2, 3).wait(5).steps()
    job.take(ScaleRequested(minimum=4, maximum=5, resources={"cpu": "16", "memory": "32Gi"}))
    assert [(job.node(rank).cpu, job.node(rank).memory) for rank in (0, 4)] == [(None, None), ("16", 32 * GI)]
    assert status(job).requests == {"cpu": "16", "memory": "32Gi"}
    job.transition(0, NodeLost, detail="gone")
    assert (job.node(0).incarnation, job.node(0).cpu) == (2, "16")


def test_one_node_is_replaced_by_one_that_requests_something_else_and_keeps_that():
    job = pods(None).running()
    job.take(RelaunchRequested(rank=1, resources={"memory": "512Gi"})).those_that_leave_end()
    assert [(job.node(rank).incarnation, job.node(rank).memory) for rank in (0, 1)] == [(1, None), (2, 512 * GI)]
    assert status(job).requests == {"cpu": "64", "memory": "256Gi"}
    job.transition(1, NodeLost, detail="gone").transition(0, NodeLost, detail="gone")
    assert [(job.node(rank).incarnation, job.node(rank).memory) for rank in (0, 1)] == [(2, None), (3, 512 * GI)]
    job.take(ScaleRequested(minimum=2, maximum=2, resources={"memory": "64Gi"}))
    job.transition(1, NodeLost, detail="gone").wait(5 * MINUTE)
    assert job.node(1).memory == 64 * GI, "what is said last of all nodes counts"


def test_a_node_that_a_user_has_given_more_than_there_is_relaxes_as_others_do():
    job = pods({"cpu": 8}).running().take(RelaunchRequested(rank=1, resources={"cpu": "500"})).those_that_leave_end()
    assert job.node(1).cpu == "500"
    waits(job, 1).wait(MINUTE)
    assert job.node(1).cpu == "8"


def seen(fits: bool, **requests: str) -> RoomSeen:
    return RoomSeen(uid="", role="worker", requests=requests, fits=fits)


def test_less_is_not_requested_while_no_machine_has_room_for_that_either():
    job = waits(pods({"cpu": 8}), 0, 1).take(seen(False, cpu="8")).wait(MINUTE)
    assert [job.node(rank).incarnation for rank in (0, 1)] == [1, 1]
    [found] = status(job).smaller
    assert found.nowhere
    assert text.smaller(found).endswith("nor for 8, by scaling.relax: requested once one has")
    job.take(seen(True, cpu="8"))
    assert [job.node(rank).cpu for rank in (0, 1)] == ["8", "8"]


def test_what_is_told_of_room_counts_for_minutes_and_for_that_request_alone():
    job = waits(pods({"cpu": 8}), 0, 1).take(seen(False, cpu="8")).wait(4 * MINUTE)
    assert job.node(0).incarnation == 1
    job.take(seen(False, cpu="8")).wait(4 * MINUTE)
    assert job.node(0).incarnation == 1
    job.wait(2 * MINUTE)
    assert job.node(0).cpu == "8", "it was told nothing more: it tries"
    other = waits(pods({"cpu": 8}), 0, 1).take(seen(False, cpu="16")).wait(MINUTE)
    assert other.node(0).cpu == "8"
