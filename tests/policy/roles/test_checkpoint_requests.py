"""A request for a checkpoint has one number in all roles: a client that waits for the answer looks at one of them."""

from __future__ import annotations

from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import commits
from perdure.workflows.policy.facts.events import ForRole, RelaunchRequested
from tests.policy.job_of_roles import Roles


def requests(job: Roles) -> list[int]:
    return [role.checkpoints.requests for role in job.state.roles.values()]


def test_a_request_has_a_number_that_none_of_the_roles_has_had():
    job = Roles(storage="file:///ckpt").runs("trainer", "evaluator")
    job.take(ForRole("evaluator", RelaunchRequested(rank=0)))
    assert requests(job) == [0, 1], "its node is replaced after a checkpoint"
    assert requests(job.take(commits.request_of_all(job.state))) == [2, 2]


def test_a_run_of_an_earlier_release_numbers_the_requests_of_each_role():
    job = Roles(storage="file:///ckpt").runs("trainer", "evaluator")
    job.state = job.state.replace(behavior=Behavior.RELEASE_0_3)
    job.take(ForRole("evaluator", RelaunchRequested(rank=0)))
    assert requests(job.take(commits.request_of_all(job.state))) == [1, 2]
