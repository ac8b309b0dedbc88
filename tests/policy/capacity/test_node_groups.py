"""Tests that nodes of one group are replaced together, and others are not."""

from __future__ import annotations

import pytest

from perdure.contract import NodePhase
from perdure.workflows.policy.facts.events import ForRole, RelaunchRequested
from tests.policy.job_of_roles import Roles
from tests.policy.scenario import Scenario


def incarnations(job: Roles, role: str = "trainer") -> list[int]:
    return [node.incarnation for _, node in sorted(job.view(role).nodes.items())]


def grouped(**fields: object) -> Roles:
    return Roles(trainer={"nodes": 6, "node_group": 2, **fields}, evaluator={}).runs("trainer", "evaluator")


@pytest.mark.parametrize("fields", [{}, {"ready": {"port": 6000}}], ids=["trainer", "service"])
def test_the_loss_of_a_node_replaces_its_group(fields: dict[str, object]):
    job = grouped(**fields).lost("trainer", 3)
    assert incarnations(job) == [1, 1, 2, 2, 1, 1]
    assert incarnations(job, "evaluator") == [1, 1]
    [incident] = job.state.incidents
    assert incident.culprit == 3
    assert [one.text for one in incident.evidence if one.rank == 2] == [
        "replaced with node 3, with which it is in a group (node_group: 2)"
    ]
    job.left("trainer").ready("trainer", 2, 3).steps("trainer")
    assert (job.view("trainer").generation, job.view("trainer").stepping) == (2, True)
    assert job.state.restart_count == 1
    job.wait(3600)
    assert incarnations(job) == [1, 1, 2, 2, 1, 1], "once"


def test_a_verdict_that_replaces_a_node_replaces_its_group():
    role = {"nodes": 4, "node_group": 2, "command": ["torchrun", "train.py"]}
    rule = {"match": {"signals": ["SIGKILL"]}, "action": "replace"}
    job = Scenario(roles={"worker": role}, retry={"rules": [rule]}).running().rank_killed(3)
    assert [node.incarnation for _, node in sorted(job.state.nodes.items())] == [1, 1, 2, 2]


def test_two_groups_lose_nodes_at_once():
    job = grouped().lost("trainer", 0, 5)
    assert incarnations(job) == [2, 2, 1, 1, 2, 2]


def test_a_killed_rank_replaces_nothing():
    job = grouped().rank_killed("trainer", 0)
    assert incarnations(job) == [1] * 6


def test_a_node_that_a_user_replaces_takes_its_group_along():
    job = grouped().take(ForRole("trainer", RelaunchRequested(rank=4)))
    assert incarnations(job) == [1, 1, 1, 1, 2, 2]


def test_a_new_node_that_is_lost_before_it_is_in_a_world_is_replaced_alone():
    job = grouped().lost("trainer", 0)
    job.lost("trainer", 0).wait(600)
    assert incarnations(job)[1] == 2
    assert incarnations(job)[0] > 2
    assert job.view("trainer").nodes[2].phase is NodePhase.READY
