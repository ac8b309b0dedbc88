"""What a group that was reset has forgotten takes nothing from what its job knows."""

from __future__ import annotations

from perdure.contract import NodePhase, NodeView
from perdure.contract.identity import identity_of
from perdure.workflows.policy.facts.events import GroupAdopted
from tests.policy.scenario import Scenario


def view(job: Scenario, rank: int, phase: NodePhase) -> NodeView:
    node = job.state.nodes[rank]
    return NodeView(**identity_of(node), token=node.token, phase=phase, since=job.now, reason="killed")


def test_a_table_from_before_a_node_was_ready_leaves_it_ready():
    job = Scenario("2").running()
    job.take(GroupAdopted(group=0, nodes=(view(job, 1, NodePhase.REQUESTED),), declined=True))
    assert job.state.nodes[1].phase is NodePhase.READY
    assert (job.generation, job.state.interruption) == (1, None)


def test_a_node_that_is_lost_by_its_groups_table_is_replaced():
    job = Scenario("2").running()
    job.take(GroupAdopted(group=0, nodes=(view(job, 1, NodePhase.LOST),), declined=True))
    assert job.incarnations == {0: 1, 1: 2}
