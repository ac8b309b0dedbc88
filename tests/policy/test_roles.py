"""Tests that the roles of one job are decided each by itself, and what they share."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from perdure.contract import Failure, FailureKind, JobPhase
from perdure.workflows.policy.decide import decide_all
from perdure.workflows.policy.facts.events import ForRole, GroupWoundDown, RelaunchRequested, ScaleRequested
from perdure.workflows.policy.state.job import JobState, UnknownRole
from perdure.workflows.policy.world.group_desire import is_over
from tests.policy.job_of_roles import NOW, Roles


def test_each_role_forms_its_own_world():
    job = Roles().runs("evaluator")
    assert job.view("trainer").world is None
    assert job.view("evaluator").stepping
    assert job.state.phase is JobPhase.STARTING, "the job is in the phase of the role that is behind"
    job.runs("trainer")
    assert [role.generation for role in job.state.roles.values()] == [1, 1]
    assert job.state.phase is JobPhase.RUNNING


def test_a_failure_in_one_role_leaves_the_world_of_the_other_alone():
    job = Roles().runs("trainer").runs("evaluator")
    before = job.state.roles["trainer"]
    job.rank_killed("evaluator", 1)
    assert job.state.roles["trainer"] == before
    assert job.view("evaluator").generation == 2, "its survivors get another world at once"
    assert [len(role.restarts) for role in job.state.roles.values()] == [0, 1], "each role has a budget of its own"
    assert job.state.restart_count == 1
    [incident] = job.state.incidents
    assert (incident.role, incident.culprit) == ("evaluator", 1)
    assert job.view("trainer").open_incident is None
    job.runs("evaluator")
    assert job.state.open_incident is None


def test_incidents_of_two_roles_are_kept_apart():
    job = Roles().runs("trainer").runs("evaluator")
    job.rank_killed("trainer", 0).rank_killed("evaluator", 1)
    assert [(one.number, one.role, one.culprit) for one in job.state.incidents] == [
        (1, "trainer", 0),
        (2, "evaluator", 1),
    ]
    job.runs("trainer")
    assert job.view("trainer").open_incident is None
    assert job.state.open_incident == job.view("evaluator").open_incident is not None


def test_a_job_succeeds_when_all_its_roles_have():
    job = Roles().runs("trainer").runs("evaluator")
    job.command_ended("trainer")
    assert job.state.outcome is None
    assert job.view("trainer").completed
    job.command_ended("evaluator")
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_job_is_over_when_the_groups_of_all_roles_are_gone():
    job = Roles().runs("trainer").runs("evaluator").command_ended("trainer").command_ended("evaluator")
    job.take(ForRole("trainer", GroupWoundDown(group=0)))
    assert not is_over(job.state)
    job.take(ForRole("evaluator", GroupWoundDown(group=0)))
    assert is_over(job.state)


def test_a_request_changes_the_role_that_it_names():
    job = Roles().runs("trainer").runs("evaluator")
    job.take(ForRole("evaluator", ScaleRequested(minimum=3, maximum=3)))
    assert [role.nodes_max for role in job.state.roles.values()] == [2, 3]
    job.take(ForRole("evaluator", RelaunchRequested(rank=1)))
    assert [role.nodes[1].incarnation for role in job.state.roles.values()] == [1, 2]


def test_a_role_that_the_job_does_not_have_is_refused_with_those_that_it_has():
    job = Roles()
    for name, got in (("rollout", 'got "rollout"'), (None, "missing")):
        with pytest.raises(UnknownRole, match=f'role: {got}; this job has the roles "trainer", "evaluator"'):
            job.take(ForRole(name, ScaleRequested(minimum=1, maximum=1)))


def test_a_failure_of_an_unknown_role_changes_nothing():
    job = Roles().runs("trainer").runs("evaluator")
    before = job.state
    sender = job.sender("trainer", 0).model_copy(update={"role": "rollout"})
    job.take(Failure(sender=sender, sequence=1, time=NOW, generation=1, kind=FailureKind.RANKS))
    assert job.state == before


def test_an_event_for_an_unknown_role_is_left_out_and_counted():
    job, dropped = Roles(), list[str]()
    events = [ForRole("rollout", GroupWoundDown(group=0))]
    state = decide_all(job.state, events, job.job, NOW, new_token=uuid4, dropped=dropped.append)
    assert state.dropped_events == 1
    assert dropped[0].startswith("GroupWoundDown: UnknownRole")


def test_a_job_with_several_roles_survives_continue_as_new():
    job = Roles().runs("trainer").rank_killed("trainer", 0)
    assert JobState.model_validate_json(job.state.model_dump_json()) == job.state


def test_the_restarts_of_a_job_of_an_earlier_release_become_those_of_its_role():
    job = Roles(worker={})
    carried: dict[str, Any] = job.state.model_dump(mode="json") | {"restarts": [NOW.isoformat()]}
    del carried["roles"]["worker"]["restarts"]
    assert JobState.model_validate(carried).roles["worker"].restarts == (NOW,)
