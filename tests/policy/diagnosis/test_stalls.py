"""Tests that a stalled node is shown and nothing is done about it; a later incident begins with it."""

from __future__ import annotations

from datetime import timedelta

from perdure.cli.live import line_of
from perdure.client.views import JobSnapshot
from perdure.contract import JobPhase
from perdure.contract.transitions import NodeStalled, NodeStallEnded
from perdure.workflows.policy.record.projections import next_action, node_views, status_of
from perdure.workflows.policy.timers import next_deadline
from tests.policy.scenario import Scenario, counted


def stalled(job: Scenario) -> tuple[int, ...]:
    known = status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)
    assert {view.rank for view in node_views(job.state) if view.stalled_since} == set(known.stalled)
    return known.stalled


def test_it_is_shown_until_it_steps_again():
    job = Scenario("2").running().wait(3).transition(1, NodeStalled, generation=1)
    assert stalled(job) == (1,)
    assert job.state.phase is JobPhase.RUNNING
    assert job.state.reason == "2 of 2 nodes, 2 ranks; no steps on node 1 since 00:00:03 UTC"
    job.transition(0, NodeStalled, generation=1)
    assert "no steps on nodes 0, 1 since 00:00:03 UTC" in job.state.reason
    job.transition(0, NodeStallEnded, generation=1).transition(1, NodeStallEnded, generation=1)
    assert stalled(job) == ()
    assert job.state.reason == "2 of 2 nodes, 2 ranks"


def test_what_happens_next_is_that_it_is_waited_for():
    job = Scenario("2").running().wait(3).transition(1, NodeStalled, generation=1)
    assert next_action(job.state, job.job).startswith("waits for node 1 to step again; nothing is restarted")
    known = status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)
    snapshot = JobSnapshot(time=job.now, status=known, nodes=node_views(job.state), progress=counted(7))
    assert "no step on node 1 for" in line_of(snapshot)
    assert next_action(job.transition(1, NodeStallEnded, generation=1).state, job.job) == "nothing to do"


def test_nothing_is_done_about_it():
    job = Scenario("1:2").running().transition(1, NodeStalled, generation=1)
    assert next_deadline(job.whole, job.job, job.now) is None
    job.wait(timedelta(days=1))
    assert job.generation == 1
    assert not job.state.incidents


def test_an_incident_that_follows_begins_with_it():
    job = Scenario("2").running().wait(1).transition(1, NodeStalled, generation=1)
    stalled_at = job.now
    job.wait(timedelta(minutes=30)).peer_failed(0).peer_failed(1)
    incident = job.state.incidents[-1]
    assert incident.started_at == stalled_at
    assert incident.evidence[0].text == "node 1 stepped for the last time"
    assert job.generation == 2
    assert stalled(job.steps()) == ()


def test_a_stall_of_a_world_that_is_over_is_not_shown():
    job = Scenario("2").running().rank_killed(0).transition(1, NodeStalled, generation=1).steps()
    assert stalled(job) == ()
