"""Tests that a job's number of restarts is the same wherever it is shown."""

from __future__ import annotations

from datetime import timedelta

from perdure.workflows.policy.facts.events import RestartRequested
from perdure.workflows.policy.record.projections import result_of, status_of
from tests.policy.scenario import Scenario, reported


def counts(job: Scenario) -> tuple[int, int]:
    """In `status` and the job's result."""
    known = status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)
    return known.restarts_total, result_of(job.state, job.now).restarts


def test_all_that_failures_caused_count_also_beyond_the_window_and_the_incidents_that_are_kept():
    job = Scenario("2", retry={"window": "1h", "max_restarts": 3}).running()
    for restart in range(60):
        job.wait(timedelta(minutes=30)).rank_killed(0, progress=reported(restart)).steps()
    job.finish(0, 1)
    assert len(job.state.incidents) < 60
    assert counts(job) == (60, 60)


def test_nodes_that_are_lost_together_and_users_wishes_are_no_further_restarts():
    job = Scenario("1:4").running().take(RestartRequested()).steps().lost_together(2, 3).steps().lost(1).steps()
    job.finish(0)
    assert counts(job) == (1, 1)


def test_a_failure_that_ends_the_job_is_no_restart():
    job = Scenario("1", retry={"max_restarts": 1}).running().rank_killed(0).steps().wait(30).rank_killed(0)
    assert job.state.outcome is not None
    assert job.state.outcome.reason.startswith("1 restart within")
    assert counts(job) == (1, 1)


def test_the_step_of_a_newer_world_counts_also_where_it_is_lower() -> None:
    job = Scenario("2").running()
    for step, generation in ((95, 1), (60, 2)):
        assert job.generation == generation
        progress = reported(step).model_copy(update={"generation": generation})
        job.rank_raised(1, progress=progress).steps()
        assert job.incident.step_before == step
    assert job.state.memory.best_step == 95
