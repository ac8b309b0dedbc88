"""Tests that effects of users' requests are shown as such: the rule, the text and the user's reason."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import EvidenceSource, FailureClass, JobPhase
from perdure.workflows.policy.facts.events import (
    CancelRequested,
    RelaunchRequested,
    RestartRequested,
    ResumeRequested,
    ScaleRequested,
    SuspendRequested,
)
from tests.policy.scenario import Scenario


def assert_asked(job: Scenario, title: str) -> None:
    told = job.incident
    assert told.title == title
    assert told.rule == 'user/1 "requested by a user"'
    assert told.failure is None
    assert {evidence.source for evidence in told.evidence} == {EvidenceSource.USER}


def assert_of_capacity(job: Scenario, title: str) -> None:
    assert job.incident.title == title
    assert job.incident.rule.startswith("capacity/1")


@pytest.mark.parametrize(
    ("minimum", "maximum", "reason", "request_"),
    [
        (2, 2, "", "scale to 2 requested by a user"),
        (1, 2, "", "scale to 1:2 requested by a user"),
        (2, 2, "making room", "scale to 2 requested by a user: making room"),
    ],
)
def test_scaling_down_is_named(minimum: int, maximum: int, reason: str, request_: str):
    job = Scenario("3").running().take(ScaleRequested(minimum=minimum, maximum=maximum, reason=reason))
    job.those_that_leave_end()
    assert_asked(job, f"world shrinks from 3 to 2 nodes: {request_}")
    assert (job.incident.nodes_before, job.incident.nodes_after) == (3, 2)


def test_scaling_up_is_named_when_the_nodes_have_come():
    job = Scenario("1").running().take(ScaleRequested(minimum=1, maximum=3, reason="night"))
    assert not job.state.incidents
    job.wait(timedelta(hours=1)).ready(1).wait(5)
    assert_asked(job, "world grows from 1 to 2 nodes: scale to 1:3 requested by a user: night")
    job.steps().wait(60).ready(2).wait(5)
    assert_asked(job, "world grows from 2 to 3 nodes: scale to 1:3 requested by a user: night")
    assert not job.state.request_reasons


def test_a_request_is_named_once_and_what_follows_is_not_its_doing():
    job = Scenario("1:2").running().take(ScaleRequested(minimum=1, maximum=3)).ready(2).steps()
    assert_asked(job, "world grows from 2 to 3 nodes: scale to 1:3 requested by a user")
    job.lost(2).steps().ready(2)
    assert_of_capacity(job, "world grows from 2 to 3 nodes")


def test_growth_by_nodes_that_were_wanted_before_is_not_the_request():
    job = Scenario("1:2").ready(0).wait(5).steps().take(ScaleRequested(minimum=1, maximum=3)).ready(1).wait(5)
    assert_of_capacity(job, "world grows from 1 to 2 nodes")
    job.steps().ready(2)
    assert_asked(job, "world grows from 2 to 3 nodes: scale to 1:3 requested by a user")


def test_the_newest_request_counts():
    job = Scenario("2").running().take(ScaleRequested(minimum=2, maximum=3, reason="first"))
    job.take(ScaleRequested(minimum=2, maximum=4, reason="second")).ready(2, 3).wait(5)
    assert "scale to 2:3 requested by a user: first; scale to 2:4 requested by a user: second" in job.incident.title
    job = Scenario("3").running().take(ScaleRequested(minimum=2, maximum=2)).those_that_leave_end().steps()
    job.take(ScaleRequested(minimum=3, maximum=3, reason="back")).ready(2)
    assert_asked(job, "world grows from 2 to 3 nodes: scale to 3 requested by a user: back")


def test_a_failure_during_a_request_stays_a_failure():
    job = Scenario("2").running().take(ScaleRequested(minimum=2, maximum=3)).rank_killed(0)
    assert job.incident.failure is FailureClass.KILLED
    assert job.steps().ready(2).generation == 3
    assert_asked(job, "world grows from 2 to 3 nodes: scale to 2:3 requested by a user")


def test_a_suspension_is_one_incident_until_the_resumed_job_steps():
    job = Scenario("2").running().take(SuspendRequested(reason="maintenance"))
    assert_asked(job, "suspended by a user: maintenance")
    assert job.state.reason == "suspended by a user: maintenance"
    job.wait(timedelta(hours=2)).take(ResumeRequested(reason="over")).ready(0, 1)
    assert job.incident.generation_after == 2
    job.steps()
    assert_asked(job, "suspended by a user: maintenance")
    assert [evidence.text for evidence in job.incident.evidence] == [
        "suspended by a user: maintenance",
        "resumed by a user: over",
    ]
    stepping_at = job.incident.stepping_at
    assert stepping_at is not None
    assert stepping_at - job.incident.started_at == timedelta(hours=2)
    assert job.state.phase is JobPhase.RUNNING
    assert not job.state.restarts


def test_a_suspension_ends_the_story_of_the_failure_before_it():
    job = Scenario("2").running().lost(1).take(SuspendRequested())
    failed, suspended = job.state.incidents
    assert failed.failure is FailureClass.NODE_LOST
    assert (failed.stepping_at, failed.closed_at) == (None, job.now)
    assert suspended.title == "suspended by a user"


def test_restart_is_named():
    job = Scenario("2").running().take(RestartRequested(reason="new config"))
    assert_asked(job, "restart requested by a user: new config")


def test_relaunch_is_named_when_the_node_goes_and_when_the_next_one_comes():
    job = Scenario("1:2").running().take(RelaunchRequested(rank=1, reason="slow disk"))
    assert_asked(job, "replacement of node 1 requested by a user: slow disk")
    assert job.removed(1).steps().ready(1).generation == 3
    assert_asked(job, "world grows from 1 to 2 nodes: replacement of node 1 requested by a user: slow disk")


def test_cancel_is_named():
    job = Scenario("2").running().take(CancelRequested(reason="wrong data"))
    assert job.state.outcome is not None
    assert job.state.outcome.reason == "cancelled: wrong data"


def test_a_node_whose_command_had_ended_when_it_was_scaled_down_is_requested_again_after_a_suspension():
    job = Scenario("3").running().command_ended(1)
    job.ready(0, after=1).take(ScaleRequested(minimum=1, maximum=1)).wait(timedelta(seconds=2))
    assert not job.node(1).alive
    job.take(SuspendRequested()).take(ScaleRequested(minimum=1, maximum=2)).take(ResumeRequested())
    assert job.node(1).alive
