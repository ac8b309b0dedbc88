"""Tests of what a job has to tell."""

from __future__ import annotations

from datetime import timedelta

from perdure.contract import FailureClass, JobPhase, Notice, NotificationBody, NotifiedJob
from perdure.contract.transitions import NodeStalled, NodeStallEnded
from perdure.workflows.policy.facts.events import CancelRequested
from perdure.workflows.policy.record.notices import notices_between
from perdure.workflows.policy.state.job import JobState
from tests.policy.scenario import Scenario

JOB = NotifiedJob(namespace="nlp", name="llama", uid="0123abcd", backend="local")


def told(before: JobState, job: Scenario) -> list[Notice]:
    return list(notices_between(before, job.whole, job.job, job.now))


def kinds(notices: list[Notice]) -> list[tuple[str, str | None, int]]:
    return [(one.occasion.value, one.state, one.number) for one in notices]


def test_an_incident_is_told_when_it_begins_and_when_all_step_again():
    job = Scenario("2").running()
    before = job.whole
    job.rank_killed(1)
    [begun] = told(before, job)
    assert kinds([begun]) == [("incident", "begun", 1)]
    assert begun.incident is not None
    assert (begun.incident.failure, begun.incident.culprit) == (FailureClass.KILLED, 1)
    assert begun.time == job.incident.started_at
    assert begun.incident.action
    before = job.whole
    job.ready(0, 1, after=1)
    job.wait(4)
    job.steps(0, 1)
    [over] = told(before, job)
    assert kinds([over]) == [("incident", "over", 1)]
    assert over.incident is not None
    assert over.incident.restored
    assert over.incident.duration_s is not None
    assert over.title.endswith(f"training again after {over.incident.duration_s:.1f} s")


def test_a_decision_that_changes_nothing_tells_nothing():
    job = Scenario("2").running()
    assert told(job.whole, job) == []


def test_a_stall_is_told_once_and_so_is_its_end():
    job = Scenario("2").running()
    before = job.whole
    job.transition(0, NodeStalled, generation=1)
    one = told(before, job)
    middle = job.whole
    job.transition(1, NodeStalled, generation=1)
    assert told(middle, job) == []
    assert kinds(one) == [("stall", "begun", 1)]
    assert one[0].stalled == (0,)
    before = job.whole
    job.transition(0, NodeStallEnded, generation=1).transition(1, NodeStallEnded, generation=1)
    assert kinds([n for n in told(before, job) if n.occasion.value == "stall"]) == [("stall", "over", 1)]


def test_a_budget_is_told_once_when_it_is_nearly_spent():
    job = Scenario("1", retry={"max_restarts": 5, "no_progress_limit": 20}).running()
    budgets: list[tuple[int, int]] = []
    for generation in range(1, 6):
        before = job.whole
        job.wait(40)
        job.rank_killed(0)
        budgets += [(generation, n.budget.restarts) for n in told(before, job) if n.budget is not None]
        job.ready(0, after=generation)
        job.steps(0)
    assert budgets == [(4, 4)]


def test_the_end_is_told_with_its_reason():
    job = Scenario("1").running()
    before = job.whole
    job.take(CancelRequested(reason="the budget of the team is spent"))
    [end] = [notice for notice in told(before, job) if notice.outcome is not None]
    assert end.outcome is not None
    assert (end.occasion.value, end.outcome.phase, end.outcome.exit_code) == ("completion", JobPhase.CANCELLED, 4)
    assert "the budget of the team is spent" in end.title


def test_ids_are_the_same_for_the_same_notice_and_differ_between_notices_and_runs():
    job = Scenario("1").running()
    before = job.whole
    job.rank_killed(0)
    [notice] = told(before, job)
    later = notice.replace(time=notice.time + timedelta(seconds=1))
    bodies = [
        NotificationBody.of(JOB, notice),
        NotificationBody.of(JOB, notice, dropped=3),
        NotificationBody.of(JOB, later),
        NotificationBody.of(JOB.replace(uid="fedcba98"), notice),
    ]
    assert bodies[0].id == bodies[1].id
    assert len({body.id for body in bodies}) == 3
    assert bodies[0].text.startswith("nlp/llama: incident 1: ")
