"""Tests of nodes that get more memory where they run."""

from __future__ import annotations

import pytest

from perdure.contract import JobPhase, RaiseMemory, ReplaceNodes
from perdure.contract.transitions import NodeMemoryRaised
from perdure.workflows.policy.capacity.memory_in_place import PATIENCE
from perdure.workflows.policy.record import projections
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import Scenario

GI = 2**30


def pods(nodes: str = "2", backend: str = "kubernetes", memory_max: str = "64Gi") -> Scenario:
    scaling = {"memory_max": memory_max}
    role = {"nodes": nodes, "command": ["torchrun", "train.py"], "resources": {"memory": "16Gi"}, "scaling": scaling}
    return Scenario(backend=backend, roles={"worker": {**role, "image": "x"} if backend == "kubernetes" else role})


def killed(job: Scenario, rank: int = 1) -> Scenario:
    """A rank was killed at the limit of its container, and the node lives."""
    return job.rank_killed(rank, out_of_memory=True, memory_limit=16 * GI)


def raised(job: Scenario, rank: int = 1, memory: int = 24 * GI, problem: str = "") -> Scenario:
    return job.transition(rank, NodeMemoryRaised, memory=memory, problem=problem)


def test_a_node_gets_more_memory_where_it_runs_and_no_world_is_formed_before():
    job = killed(pods().running())
    assert job.incident.rule == 'out-of-memory/3 "raise its memory where it runs"'
    assert [one.in_place for one in job.incident.actions if isinstance(one, RaiseMemory)] == [(1,)]
    assert job.incident.action == (
        "restart the ranks of every node in place; node 1 gets 24Gi of memory instead of 16Gi without a new pod, and "
        "new nodes request as much"
    )
    [desire] = desires_of(job.state).values()
    assert {rank: node.memory for rank, node in desire.nodes.items()} == {0: None, 1: 24 * GI}
    assert (job.generation, job.state.phase) == (1, JobPhase.RECOVERING)
    shown = projections.status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)
    assert shown.next_action == "the next world waits until node 1 has 24Gi of memory where it runs"

    raised(job)
    assert (job.generation, job.node(1).incarnation, job.node(1).memory) == (2, 1, 24 * GI)
    assert not any(isinstance(one, ReplaceNodes) for one in job.incident.actions)


def test_an_elastic_job_waits_for_it_too():
    job = killed(pods("1:2").running())
    assert job.generation == 1
    assert raised(job).generation == 2
    assert job.state.world is not None
    assert job.state.world.nodes == 2


def test_a_node_whose_machine_has_no_room_is_replaced_by_one_that_requests_it():
    job = killed(pods().running())
    raised(job, problem="its machine has no room for that (Deferred: Node didn't have enough resource: memory)")
    assert (job.node(1).incarnation, job.node(1).memory) == (2, 24 * GI)
    assert job.node(0).incarnation == 1
    assert "node 1 is replaced by one that requests 24Gi of memory: its machine has no room" in job.incident.waited_for


def test_a_group_that_does_not_answer_is_not_waited_for_without_end():
    job = killed(pods().running()).wait(PATIENCE)
    assert job.node(1).incarnation == 2
    raised(job)
    assert job.node(1).incarnation == 2, "a late answer is about the one before"


def test_a_late_or_a_repeated_answer_changes_nothing():
    job = raised(killed(pods().running()))
    raised(raised(job), problem="late")
    assert (job.generation, job.node(1).incarnation) == (2, 1)
    assert raised(job, rank=0, problem="of another node").node(0).incarnation == 1


def test_a_node_that_is_lost_meanwhile_is_replaced():
    job = killed(pods().running()).lost(1)
    assert (job.node(1).incarnation, job.node(1).memory) == (2, 24 * GI)
    assert job.node(1).memory_awaited_until is None


def test_a_second_kill_raises_it_from_there():
    job = raised(killed(pods().running())).steps()
    job.rank_killed(1, out_of_memory=True, memory_limit=24 * GI)
    assert job.node(1).memory == 36 * GI
    assert raised(job, memory=24 * GI).generation == 2, "the answer to the first one"
    assert raised(job, memory=36 * GI).generation == 3


def test_a_new_node_requests_it_from_the_start():
    job = raised(killed(pods().running())).steps().lost(0)
    assert job.node(0).memory == 24 * GI
    assert job.node(0).memory_awaited_until is None


@pytest.mark.parametrize("backend", ["ray", "local"])
def test_where_a_request_limits_nothing_no_memory_is_requested_or_said_to_be(backend: str):
    job = killed(pods(backend=backend).running())
    assert job.node(1).memory is None
    assert job.state.host_memory.requested is None
    assert "memory" not in job.incident.action
    assert not job.incident.rule.startswith("out-of-memory")
