"""Golden tables of a job of several roles that was reset: it adopts the nodes of its roles, one group at a time."""

from __future__ import annotations

from perdure.contract import JobPhase, NodeView
from perdure.workflows.policy.facts.events import ForRole, GroupAdopted
from tests.policy.job_of_roles import Roles


def built_in_stages() -> Roles:
    """Each role waits for the one before it."""
    return Roles(
        data={"nodes": 1},
        tokenizer={"nodes": 1, "depends_on": {"data": "completed"}},
        ps={"ready": {"port": 6000}, "depends_on": {"tokenizer": "completed"}},
        trainer={"depends_on": {"ps": "ready"}},
    )


def adopt(job: Roles, earlier: Roles, *roles: str) -> Roles:
    """The groups of these roles send what they have of the earlier run."""
    for role in roles:
        known = earlier.view(role)
        views = tuple(
            NodeView(
                rank=node.rank,
                incarnation=node.incarnation,
                phase=node.phase,
                since=node.since,
                token="theirs",
                generation=known.generation,
                address=node.address,
                store_ports=node.store_ports,
            )
            for node in known.nodes.values()
            if node.alive
        )
        job.take(ForRole(role, GroupAdopted(group=0, nodes=views)))
    return job


def all_run() -> Roles:
    job = built_in_stages()
    job.runs("data").command_ended("data").runs("tokenizer").command_ended("tokenizer")
    return job.runs("ps").runs("trainer")


def test_a_role_that_has_nodes_waits_no_more_and_those_for_which_it_waited_have_completed():
    job = adopt(built_in_stages(), all_run(), "trainer", "data", "tokenizer")
    assert job.view("trainer").generation == 2, "it has nodes, whatever is known of the servers"
    assert job.view("ps").reason == "waits for tokenizer to complete"
    adopt(job, all_run(), "ps")
    assert [(role.role, role.phase, role.generation) for role in job.state.roles.values()] == [
        ("data", JobPhase.SUCCEEDED, 0),
        ("tokenizer", JobPhase.SUCCEEDED, 0),
        ("ps", JobPhase.RENDEZVOUS, 2),
        ("trainer", JobPhase.RENDEZVOUS, 2),
    ]
    assert job.state.roles["tokenizer"].reason == "it had completed before role ps started"
    assert job.state.roles["data"].reason == "it had completed before role tokenizer started"
    assert job.view("data").is_idle, "it needs no node"
    job.steps("ps").steps("trainer")
    assert job.state.phase is JobPhase.RUNNING
    assert not job.state.incidents
    job.command_ended("trainer")
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_completion_that_no_node_proves_is_forgotten():
    job = adopt(built_in_stages(), built_in_stages(), "tokenizer", "ps", "trainer", "data")
    assert job.view("tokenizer").reason == "waits for data to complete"
    job.runs("data").command_ended("data").runs("tokenizer")
    assert job.view("tokenizer").stepping
