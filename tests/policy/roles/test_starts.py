"""Golden tables of the order in which the roles of a job start, and of its end."""

from __future__ import annotations

from perdure.contract import JobPhase
from perdure.workflows.policy.facts.events import ResumeRequested, SuspendRequested
from tests.policy.job_of_roles import Roles


def trained_by_services() -> Roles:
    return Roles(
        trainer={"depends_on": {"ps": "ready", "data": "completed"}},
        ps={"ready": {"port": 6000}, "depends_on": {"data": "completed"}},
        data={"nodes": 1},
        evaluator={"on_failure": "ignore"},
    )


def with_nodes(job: Roles) -> list[str]:
    return [name for name, role in job.state.roles.items() if any(node.alive for node in role.nodes.values())]


def test_a_role_starts_when_the_roles_that_it_depends_on_are_ready_or_have_completed():
    job = trained_by_services()
    assert with_nodes(job) == ["data", "evaluator"]
    assert job.state.roles["trainer"].reason == "waits for ps to be ready and data to complete"
    assert job.state.roles["ps"].reason == "waits for data to complete"
    assert job.state.phase is JobPhase.STARTING
    job.runs("data").command_ended("data")
    assert with_nodes(job) == ["ps", "evaluator"], "the nodes of a role that has completed are released"
    assert job.state.roles["data"].phase is JobPhase.SUCCEEDED
    job.ready("ps")
    assert job.state.roles["trainer"].reason == "waits for ps to be ready"
    job.steps("ps")
    assert with_nodes(job) == ["trainer", "ps", "evaluator"]


def test_a_role_that_waits_for_others_does_not_determine_the_phase_of_the_job():
    job = Roles(trainer={}, evaluator={"depends_on": {"trainer": "completed"}, "ends_job": True}).runs("trainer")
    assert job.state.phase is JobPhase.RUNNING
    job.command_ended("trainer")
    assert (job.state.phase, job.state.leading.role) == (JobPhase.STARTING, "evaluator")


def test_the_roles_that_end_a_job_end_the_others():
    job = trained_by_services().runs("data").command_ended("data").runs("ps", "trainer", "evaluator")
    job.command_ended("evaluator")
    assert job.state.outcome is None
    job.command_ended("trainer")
    assert job.state.outcome is not None
    assert (job.state.outcome.phase, job.state.outcome.reason) == (
        JobPhase.SUCCEEDED,
        "all 2 ranks finished in generation 1",
    )
    assert not job.state.incidents


def test_a_suspended_job_starts_its_roles_in_their_order_again():
    job = trained_by_services().runs("data").command_ended("data").runs("ps", "trainer", "evaluator")
    job.take(SuspendRequested())
    assert with_nodes(job) == []
    job.removed("ps", "trainer", "evaluator").take(ResumeRequested())
    assert with_nodes(job) == ["ps", "evaluator"]
    job.runs("ps")
    assert with_nodes(job) == ["trainer", "ps", "evaluator"]


def test_a_role_and_the_role_that_it_depends_on_are_repaired_beside_each_other():
    job = trained_by_services().runs("data").command_ended("data").runs("ps", "trainer")
    job.lost("ps", 0).lost("trainer", 1)
    assert [job.view(role).nodes[rank].incarnation for role, rank in (("ps", 0), ("trainer", 1))] == [2, 2]
    job.ready("trainer", 1).steps("trainer")
    assert job.view("trainer").stepping
    job.ready("ps", 0).steps("ps")
    assert job.state.phase is JobPhase.STARTING, "only the evaluator has not started"
    assert job.state.open_incident is None
