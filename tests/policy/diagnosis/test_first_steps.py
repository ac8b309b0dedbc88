"""Tests of the time that a world has for its first step: learned from earlier ones, and acted upon."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import ExtendFirstStep, FailureClass, JobPhase, NodePhase
from perdure.contract.transitions import NodeStalled, NodeStepping
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import Scenario, counted

MINUTE = timedelta(minutes=1)


def limit(job: Scenario) -> timedelta | None:
    world = desires_of(job.state)[0].world
    assert world is not None
    assert job.state.world is not None
    assert world.first_step == job.state.world.first_step
    return world.first_step


def steps_after(job: Scenario, took: timedelta, *ranks: int) -> Scenario:
    """The given members, or all, make their first step this long after they entered."""
    entered_at = job.now
    job.runs(*ranks).wait(took)
    assert job.state.world is not None
    for rank in ranks or tuple(job.state.world.members):
        job.transition(rank, NodeStepping, generation=job.generation, entered_at=entered_at)
    return job


def hangs(job: Scenario, *ranks: int, **facts: Any) -> Scenario:
    """These nodes report that no rank has stepped in time; the job hears all of them before it decides."""
    for rank in ranks:
        job.transition(rank, NodeStalled, generation=job.generation, at_start=True, **facts)
    return job.wait(job.job.timing.rendezvous.victim_grace)


def test_a_job_that_has_made_no_step_has_no_limit_and_says_so():
    job = Scenario("2").ready(0, 1).runs()
    assert limit(job) is None
    assert job.state.phase is JobPhase.RUNNING
    assert "no step was seen" in job.state.reason
    assert "timing.stall.first_step" in next_action(job.state, job.job)
    assert next_deadline(job.whole, job.job, job.now) is None


@pytest.mark.parametrize(
    ("took", "expected"),
    [(timedelta(seconds=20), 30 * MINUTE), (10 * MINUTE, 50 * MINUTE), (60 * MINUTE, 300 * MINUTE)],
)
def test_a_later_world_has_several_times_the_longest_first_step_so_far(took: timedelta, expected: timedelta):
    job = steps_after(Scenario("2").ready(0, 1), took)
    assert next_action(job.state, job.job) == "nothing to do"
    job.rank_killed(0)
    assert limit(job) == expected
    steps_after(job, MINUTE).rank_killed(0)
    assert limit(job) == expected


def test_a_world_that_fails_before_it_has_reported_its_first_step_limits_the_next_one():
    job = Scenario("2").ready(0, 1)
    job.wait(10 * MINUTE).rank_killed(0, progress=counted(3))
    assert limit(job) == 50 * MINUTE
    steps_after(job, MINUTE).rank_killed(0)
    assert limit(job) == 30 * MINUTE


def test_a_world_that_fails_without_a_step_limits_nothing():
    job = Scenario("2").ready(0, 1).wait(10 * MINUTE).rank_killed(0, progress=counted(0))
    assert limit(job) is None


def test_a_limit_that_the_user_sets_holds_for_the_first_world_too():
    job = Scenario("2", timing={"stall": {"first_step": "20m"}}).ready(0, 1)
    assert limit(job) == 20 * MINUTE
    assert "for 20m from its beginning" in next_action(job.runs().state, job.job)


def test_a_limit_of_zero_turns_it_off():
    job = steps_after(Scenario("2", timing={"stall": {"first_step": "0s"}}).ready(0, 1), MINUTE).rank_killed(0)
    assert limit(job) is None


def test_ranks_that_hang_before_their_first_step_are_restarted_in_place():
    job = steps_after(Scenario("2").ready(0, 1), 20 * MINUTE).rank_killed(0).runs()
    assert job.generation == 2
    entered = job.now
    job.wait(100 * MINUTE)
    hangs(job, 0, 1, time=entered)
    assert job.generation == 3
    incident = job.incident
    assert (incident.failure, incident.culprit, incident.also_failed) == (FailureClass.HANG, None, ())
    assert incident.started_at == entered
    assert "within 1h40m after it entered generation 2; the longest first step took 20m" in incident.title
    assert incident.rule.startswith("first-step/1")
    assert job.incarnations == {0: 1, 1: 1}
    told = explanation(incident, job="llama", flag="").plain
    assert "stepped for the last time" not in told
    assert "timing.stall.first_step" in told


def test_the_time_doubles_until_a_world_steps_and_the_job_stops_when_none_does():
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).rank_killed(0)
    given: list[timedelta | None] = []
    while job.state.outcome is None:
        given.append(limit(job))
        hangs(job.runs(), 0, 1)
    assert given == [30 * MINUTE, 60 * MINUTE, 120 * MINUTE, 240 * MINUTE]
    assert job.state.outcome.reason.startswith("no progress over 3 restarts")
    assert job.state.outcome.exit_code == 3


def test_a_world_that_steps_after_a_hang_has_the_usual_limit_again():
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).rank_killed(0)
    hangs(job.runs(), 0, 1)
    assert limit(job) == 60 * MINUTE
    steps_after(job, MINUTE).rank_killed(0)
    assert limit(job) == 30 * MINUTE


def test_the_time_does_not_double_where_another_failure_ended_the_world():
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).rank_killed(0).runs()
    job.transition(0, NodeStalled, generation=2, at_start=True).rank_killed(1)
    assert (job.generation, job.incident.failure) == (3, FailureClass.KILLED)
    assert "twice the time" not in job.incident.action
    assert limit(job) == 30 * MINUTE


def test_the_first_to_report_is_not_blamed_where_no_node_steps():
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).rank_killed(0).runs()
    hangs(job, 1)
    assert (job.generation, job.incident.culprit) == (3, None)


def test_a_node_that_has_stepped_before_is_blamed_where_the_others_step():
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).rank_killed(0)
    steps_after(job, MINUTE, 0).runs(1)
    hangs(job, 1)
    assert (job.generation, job.incident.culprit) == (3, 1)


def test_ranks_that_never_step_beside_others_that_do_are_left_alone():
    """An evaluator, or a reader of data, has no optimizer."""
    job = steps_after(Scenario("2").ready(0, 1), MINUTE, 0).runs(1)
    job.rank_killed(0)
    steps_after(job, MINUTE, 0).runs(1)
    hangs(job, 1).wait(timedelta(days=1))
    assert job.generation == 2


def test_a_step_that_is_reported_before_the_decision_prevents_it():
    """After an outage the reports of hours arrive together."""
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).rank_killed(0).runs()
    for rank in (0, 1):
        job.transition(rank, NodeStalled, generation=2, at_start=True)
    assert job.state.interruption is not None
    job.steps().wait(MINUTE)
    assert (job.generation, job.state.phase) == (2, JobPhase.RUNNING)
    assert job.state.interruption is None
    assert job.state.open_incident is None
    assert memory.times_for_role(job.state, ExtendFirstStep) == 0


def test_a_report_of_a_world_that_is_over_or_of_a_node_that_is_no_member_changes_nothing():
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).rank_killed(0).runs()
    job.transition(0, NodeStalled, generation=1, at_start=True).wait(MINUTE)
    assert job.generation == 2


def test_a_replaced_node_that_hangs_is_restarted_like_the_others():
    job = steps_after(Scenario("2").ready(0, 1), MINUTE).lost(1)
    assert job.node(1).phase is NodePhase.REQUESTED
    job.ready(1).runs()
    hangs(job, 0, 1)
    assert (job.generation, job.node(1).incarnation) == (3, 2)


def test_each_stage_learns_for_itself():
    job = steps_after(Scenario("1").ready(0, stage=0), 10 * MINUTE).torchrun_finished(0)
    job.ready(0, after=1, stage=1)
    assert job.generation == 2
    assert limit(job) is None
