"""Tests that what is said about a job that has ended fits that it has."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.cli.explain import explanation
from perdure.cli.inspect import facts
from perdure.client.views import JobSummary, closed
from perdure.contract import FailureClass, JobPhase, JobStatus
from perdure.contract.transitions import NodeLost
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES
from perdure.workflows.policy.record.projections import status_of
from tests.policy.scenario import Scenario, reported


def status(job: Scenario, phase: JobPhase | None = None) -> JobStatus:
    return status_of(job.state, job.job, groups=(), phase=phase or job.state.phase, now=job.now)


def told(job: Scenario, number: int = -1) -> str:
    """What `perdure explain` tells of an incident once the job has failed."""
    return explanation(job.state.incidents[number], job="llama", flag="", ended=JobPhase.FAILED).plain


def failed(job: Scenario) -> Scenario:
    """It fails at the same step until it stops."""
    while job.state.outcome is None:
        job.rank_raised(1, progress=reported(7))
        if job.state.outcome is None:
            job.steps()
    return job


def test_the_incident_that_stopped_the_job_ends_with_what_to_do_before_the_next_start():
    job = failed(Scenario("2").running())
    assert job.incident.stopped
    assert "YOU   correct what perdure logs llama --node 1 --tail 50 shows, and start the job again" in told(job)


def test_an_earlier_incident_of_an_ended_job_asks_for_nothing():
    job = failed(Scenario("2").running())
    text = told(job, 0)
    assert not job.state.incidents[0].stopped
    assert "nothing to do: the job has ended since (failed)" in text
    assert "unless it repeats" not in text


def test_a_job_that_runs_is_advised_as_before():
    job = Scenario("2").running().rank_killed(1).steps()
    text = explanation(job.incident, job="llama", flag="").plain
    assert "nothing to do, unless it repeats" in text


@pytest.mark.parametrize("failure", FailureClass)
@pytest.mark.parametrize("stopped", [True, False])
def test_no_class_says_that_there_is_nothing_to_do_about_what_stopped_the_job(failure: FailureClass, stopped: bool):
    job = Scenario("2").running().transition(1, NodeLost)
    incident = job.incident.model_copy(update={"failure": failure, "stopped": stopped})
    text = explanation(incident, job="llama", flag=" -n team", ended=JobPhase.FAILED).plain
    assert "unless it repeats" not in text
    assert ("nothing to do" in text) is not stopped
    assert "llama -n team" in text
    assert "{" not in text
    assert FAILURE_CLASSES[failure].remedy


def test_status_gives_one_reason_for_the_end():
    job = failed(Scenario("2").running())
    known = status(job, JobPhase.FAILED)
    why = dict(facts(known, None, (), list(job.state.incidents)))["WHY"]
    assert job.state.outcome is not None
    assert why == job.state.outcome.reason
    assert why.count("ValueError: bad batch") == 1
    assert "NEXT" not in dict(facts(known, None, (), []))


def test_a_job_whose_wait_was_over_says_so_and_not_what_its_last_incident_did():
    job = Scenario("2").running().lost(1)
    job.wait(job.job.recovery.replace_timeout)
    assert job.state.outcome is not None
    assert status(job, JobPhase.FAILED).reason == job.state.outcome.reason
    assert not job.incident.stopped
    assert "nothing to do: the job has ended since" in told(job)


@pytest.mark.parametrize("phase", [JobPhase.CANCELLED, JobPhase.FAILED])
def test_a_workflow_that_was_ended_in_temporal_is_not_shown_as_running(phase: JobPhase):
    """A query still answers with the state in which it was terminated."""
    job = Scenario("3").running()
    before = status(job)
    assert (before.phase, before.reason) == (JobPhase.RUNNING, "3 of 3 nodes, 3 ranks")
    summary = JobSummary(
        name="job", namespace="default", workflow_id="job/default/job", run_id="r", started_at=job.now, phase=phase
    )
    assert closed(before, summary) == before
    after = closed(before, summary.model_copy(update={"finished_at": job.now + timedelta(minutes=1)}))
    assert (after.phase, after.finished_at) == (phase, job.now + timedelta(minutes=1))
    lines = dict(facts(after, None, (), []))
    assert "ended in Temporal" in lines["WHY"]
    assert "3 of 3 nodes" not in lines["WHY"]
    assert "NEXT" not in lines
