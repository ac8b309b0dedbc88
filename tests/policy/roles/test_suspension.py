"""Golden tables of suspensions: of one role, of the whole job, and of both at once."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ApplicationError

from perdure.contract import JobPhase, RoleRequest
from perdure.contract.transitions import NodeStepping
from perdure.workflows import requests
from perdure.workflows.policy.facts.events import ResumeRequested, SuspendRequested, TimePassed
from perdure.workflows.policy.record.projections import next_action, role_statuses
from perdure.workflows.policy.roles import addresses
from tests.policy.job_of_roles import Roles


def job_of_three() -> Roles:
    return Roles(
        trainer={"depends_on": {"ps": "ready"}}, ps={"ready": {"port": 6000}}, evaluator={"on_failure": "ignore"}
    ).runs("ps", "trainer", "evaluator")


def phases(job: Roles) -> list[JobPhase]:
    return [role.phase for role in job.state.roles.values()]


def test_a_role_is_suspended_alone_and_resumed():
    job = job_of_three()
    before = job.state.roles
    job.take(SuspendRequested(role="evaluator", reason="room"))
    assert phases(job) == [JobPhase.RUNNING, JobPhase.RUNNING, JobPhase.SUSPENDED]
    evaluator = job.state.roles["evaluator"]
    assert (evaluator.is_idle, evaluator.reason) == (True, "suspended by a user: room")
    assert [job.state.roles[name] for name in ("trainer", "ps")] == [before["trainer"], before["ps"]]
    assert job.state.phase is JobPhase.RUNNING
    assert not job.state.suspended
    assert job.state.incidents[-1].action == "release all nodes until the role is resumed"
    assert job.state.open_incident is None, "the job is whole without it, and may continue as new"
    job.removed("evaluator").wait(3600)
    assert phases(job)[2] is JobPhase.SUSPENDED
    job.take(ResumeRequested(role="evaluator")).runs("evaluator")
    assert phases(job) == [JobPhase.RUNNING] * 3
    assert job.view("evaluator").generation == 2
    assert [role.generation for role in job.state.roles.values()][:2] == [1, 1]


def test_a_suspended_role_does_not_hinder_the_end_of_the_job():
    job = job_of_three().take(SuspendRequested(role="evaluator")).removed("evaluator").command_ended("trainer")
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_job_waits_for_a_suspended_role_that_ends_it():
    job = Roles(a={}, b={}).runs("a", "b").take(SuspendRequested(role="b")).command_ended("a").wait(3600)
    assert job.state.outcome is None
    job.take(ResumeRequested(role="b")).runs("b").command_ended("b")
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_role_waits_for_a_suspended_one_and_starts_after_it():
    job = Roles(trainer={"depends_on": {"ps": "ready"}}, ps={"ready": {"port": 6000}})
    job.take(SuspendRequested(role="ps")).removed("ps").wait(3600)
    assert phases(job) == [JobPhase.STARTING, JobPhase.SUSPENDED]
    assert job.state.roles["trainer"].reason == "waits for ps to be ready"
    job.take(ResumeRequested(role="ps"))
    assert job.view("trainer").is_idle
    job.runs("ps", "trainer")
    assert phases(job) == [JobPhase.RUNNING] * 2


def test_a_dependency_is_suspended_and_resumed_under_a_running_role():
    job = job_of_three().take(SuspendRequested(role="ps"))
    assert not addresses.addresses_by_role(job.state, job.job)["ps"].addresses
    job.removed("ps").take(ResumeRequested(role="ps")).runs("ps")
    assert [role.generation for role in job.state.roles.values()] == [1, 2, 1]


def test_a_job_is_suspended_although_the_role_whose_checkpoint_it_awaits_completes_before():
    ends = {"ends_job": True}
    job = Roles(storage="file:///checkpoints", trainer=ends, evaluator=ends).runs("trainer", "evaluator")
    for rank in job.view("evaluator").nodes:
        job.transition("evaluator", rank, NodeStepping, generation=1, saves=False)
    job.take(SuspendRequested())
    assert not job.state.suspended, "the trainer makes a checkpoint first"
    job.command_ended("trainer").removed("trainer")
    assert phases(job) == [JobPhase.SUCCEEDED, JobPhase.SUSPENDED]
    job.removed("evaluator").wait(3600).take(ResumeRequested()).runs("evaluator").wait(3600)
    assert phases(job) == [JobPhase.SUCCEEDED, JobPhase.RUNNING]


def test_roles_that_restart_with_a_role_do_so_when_it_is_resumed():
    job = Roles(trainer={"restart_with": ["rollout"]}, rollout={"ends_job": False}).runs("trainer", "rollout")
    job.take(SuspendRequested(role="trainer"))
    assert job.view("rollout").generation == 1
    job.removed("trainer").take(ResumeRequested(role="trainer")).runs("trainer", "rollout")
    assert [role.generation for role in job.state.roles.values()] == [2, 2]


def test_a_role_that_was_suspended_alone_stays_so_when_the_job_is_resumed():
    job = job_of_three().take(SuspendRequested(role="evaluator")).take(SuspendRequested())
    assert phases(job) == [JobPhase.SUSPENDED] * 3
    job.removed("trainer", "ps", "evaluator").take(ResumeRequested()).runs("ps", "trainer").wait(3600)
    assert phases(job) == [JobPhase.RUNNING, JobPhase.RUNNING, JobPhase.SUSPENDED]
    job.take(ResumeRequested(role="evaluator")).runs("evaluator")
    assert phases(job) == [JobPhase.RUNNING] * 3
    assert all(incident.over_at for incident in job.state.incidents)


def test_a_role_is_suspended_and_resumed_while_the_job_is():
    job = job_of_three().take(SuspendRequested()).removed("trainer", "ps", "evaluator")
    job.take(SuspendRequested(role="evaluator")).take(ResumeRequested())
    assert job.view("evaluator").is_idle
    job.take(SuspendRequested()).take(ResumeRequested(role="evaluator"))
    assert job.view("evaluator").is_idle, "it comes with the others"
    job.removed("ps").take(ResumeRequested()).runs("ps", "trainer", "evaluator")
    assert phases(job) == [JobPhase.RUNNING] * 3


def test_resuming_a_job_that_is_not_suspended_resumes_its_roles():
    job = job_of_three().take(SuspendRequested(role="evaluator")).removed("evaluator").take(ResumeRequested())
    assert phases(job.runs("evaluator")) == [JobPhase.RUNNING] * 3


def test_roles_that_are_over_have_no_part_in_a_suspension():
    job = Roles(trainer={}, data={"nodes": 1, "ends_job": False}).runs("trainer", "data").command_ended("data")
    job.removed("data").take(SuspendRequested())
    assert phases(job) == [JobPhase.SUSPENDED, JobPhase.SUCCEEDED]
    job.removed("trainer").take(ResumeRequested()).runs("trainer")
    assert job.view("data").is_idle
    assert [incident.role for incident in job.state.incidents] == ["trainer"]
    assert job.state.open_incident is None


@pytest.mark.parametrize(
    ("before", "role", "text"),
    [
        ((), "pss", 'role: got "pss"; this job has the roles "trainer", "ps", "evaluator"'),
        (("ps",), "ps", "role ps is already suspended; resume it to continue"),
        (("",), None, "the job is already suspended; resume it to continue"),
    ],
)
def test_a_suspension_that_changes_nothing_is_refused(before: tuple[str, ...], role: str | None, text: str):
    job = job_of_three()
    for name in before:
        job.take(SuspendRequested(role=name))
    with pytest.raises(ApplicationError) as caught:
        requests.check_suspend(job.state, RoleRequest(role=role))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("before", "role", "text"),
    [
        ((), None, "the job is not suspended, so there is nothing to resume"),
        (("ps",), "trainer", "role trainer is not suspended, so there is nothing to resume"),
        (("",), "ps", "role ps is suspended with the whole job; resume it without naming a role"),
    ],
)
def test_a_resumption_that_changes_nothing_is_refused(before: tuple[str, ...], role: str | None, text: str):
    job = job_of_three()
    for name in before:
        job.take(SuspendRequested(role=name))
    with pytest.raises(ApplicationError) as caught:
        requests.check_resume(job.state, RoleRequest(role=role))
    assert text in str(caught.value)


def test_the_only_role_of_a_job_is_suspended_as_the_job():
    job = Roles(worker={}).runs("worker")
    assert requests.single_role(job.state, RoleRequest(role="worker")) == ""


def has_saved(job: Roles, role: str) -> Roles:
    """The checkpoint that the role was asked for is durable."""
    known = job.state.roles[role]
    answered = known.checkpoints.replace(answered=known.checkpoints.requests)
    job.state = job.state.with_role(known.replace(checkpoints=answered))
    return job.take(TimePassed())


def test_the_whole_job_is_suspended_once_all_its_roles_have_saved():
    job = Roles(storage="file:///ckpt", a={}, b={}, ps={"ready": {"port": 6000}}).runs("a", "b", "ps")
    job.take(SuspendRequested())
    assert phases(has_saved(job, "a")) == [JobPhase.RUNNING] * 3, "b may need the others for its checkpoint"
    assert phases(has_saved(job, "b")) == [JobPhase.SUSPENDED] * 3


def test_the_whole_job_is_suspended_at_the_latest_when_the_wait_for_checkpoints_is_over():
    job = Roles(storage="file:///ckpt", a={}, b={}, ps={"ready": {"port": 6000}}).runs("a", "b", "ps")
    assert phases(job.take(SuspendRequested()).wait(59)) == [JobPhase.RUNNING] * 3
    assert phases(job.wait(2)) == [JobPhase.SUSPENDED] * 3


def suspended_alone(job: Roles) -> list[bool]:
    return [one.suspended_alone for one in role_statuses(job.state, job.job, job.now)]


def test_the_status_of_a_role_tells_whether_it_is_suspended_without_the_job():
    job = Roles(storage="file:///ckpt", trainer={}, ps={"ready": {"port": 6000}}).runs("ps", "trainer")
    assert suspended_alone(job) == [False, False]
    assert suspended_alone(job.take(SuspendRequested(role="trainer"))) == [True, False]
    assert phases(job) == [JobPhase.RUNNING] * 2, "it saves before"
    assert suspended_alone(has_saved(job, "trainer")) == [True, False]
    assert suspended_alone(job.take(SuspendRequested())) == [True, False]
    assert suspended_alone(job.take(ResumeRequested(role="trainer"))) == [False, False]


def test_a_role_that_is_suspended_alone_saves_before_and_a_service_does_not():
    job = Roles(storage="file:///ckpt", trainer={}, ps={"ready": {"port": 6000}}).runs("trainer", "ps")
    assert phases(job.take(SuspendRequested(role="ps"))) == [JobPhase.RUNNING, JobPhase.SUSPENDED]
    assert phases(job.take(SuspendRequested(role="trainer"))) == [JobPhase.RUNNING, JobPhase.SUSPENDED]
    assert "a checkpoint, then the role trainer is suspended, at " in next_action(job.view("trainer"), job.job)
    with pytest.raises(ApplicationError, match="role trainer is being suspended; try again"):
        requests.check_suspend(job.state, RoleRequest(role="ps"))
    assert phases(has_saved(job, "trainer")) == [JobPhase.SUSPENDED] * 2
    job.removed("trainer").take(ResumeRequested(role="trainer")).runs("trainer")
    job.take(SuspendRequested(role="trainer")).take(ResumeRequested(role="trainer")).wait(3600)
    assert phases(job) == [JobPhase.RUNNING, JobPhase.SUSPENDED], "it was resumed before it was suspended"
