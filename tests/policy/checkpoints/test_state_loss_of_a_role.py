"""One role of several waits for a state that it cannot load: an older one is taken by that role alone."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ApplicationError

from perdure.contract import Lookup, RestartRequest, Restore, RestoreSource, StorageFinding
from perdure.contract.transitions import NodeRestoredCheckpoint
from perdure.workflows import requests
from perdure.workflows.policy.checkpoints import state_loss
from perdure.workflows.policy.facts.events import ForRole, RestartRequested
from perdure.workflows.policy.record.projections import warnings_of
from tests.policy.job_of_roles import Roles

LACKS = Lookup(stored=7, storage=StorageFinding.LACKS, problem="it is not mounted on this node")


def waiting(job: Roles, *roles: str) -> Roles:
    """The ranks of these roles wait for a state."""
    for role in roles:
        restored = Restore(step=0, source=RestoreSource.NOTHING, lookup=LACKS, waits=True)
        generation = job.view(role).generation
        job.transition(role, 0, NodeRestoredCheckpoint, generation=generation, restored=restored)
    return job


@pytest.fixture
def job() -> Roles:
    return Roles(storage="file:///ckpt").runs("trainer", "evaluator")


@pytest.mark.parametrize("named", [False, True])
def test_roles_that_do_not_wait_train_on_and_accept_nothing_older(job: Roles, named: bool):
    waiting(job, "trainer")
    event = RestartRequested(older=True)
    job.take(ForRole("trainer", event) if named else event)
    assert {role: one.generation for role, one in job.state.roles.items()} == {"trainer": 2, "evaluator": 1}
    assert job.view("evaluator").checkpoints.gave_up is None
    assert job.view("evaluator").interruption is None
    world = job.view("trainer").world
    assert world is not None
    assert world.known is not None
    assert world.known.accepts_less


def test_all_roles_that_wait_take_what_there_is(job: Roles):
    waiting(job, "trainer", "evaluator").take(RestartRequested(older=True))
    assert [one.generation for one in job.state.roles.values()] == [2, 2]


def test_the_remedy_names_the_role(job: Roles):
    waiting(job, "trainer")
    [warning] = [one for one in warnings_of(job.view("trainer"), job.job) if "is stored" in one]
    assert "`perdure restart job --older --role trainer` continues now" in warning


def test_a_role_that_does_not_wait_has_no_state_to_give_up(job: Roles):
    waiting(job, "trainer")
    requests.check_restart(job.state, RestartRequest(older=True))
    requests.check_restart(job.state, RestartRequest(older=True, role="trainer"))
    assert not state_loss.awaits(job.view("evaluator"))
    with pytest.raises(ApplicationError, match="no ranks wait"):
        requests.check_restart(job.state, RestartRequest(older=True, role="evaluator"))
