"""Tests of commands that fail before they have entered any world."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import FailureClass, JobPhase, NodePhase
from perdure.contract.transitions import NodeJoined
from perdure.workflows.policy.timers import next_deadline
from tests.policy.scenario import Scenario

SOON = timedelta(minutes=2)


def fail_together(job: Scenario, exit_code: int = 1) -> None:
    """Every node comes up, and its command fails at once."""
    for rank in range(job.state.nodes_max):
        job.transition(rank, NodeJoined, address=f"10.0.0.{rank}", host=f"host-{rank}")
    for rank in range(job.state.nodes_max):
        if job.state.outcome is None:
            job.command_exited(rank, exit_code, generation=0)


def wait_for_replacements(job: Scenario) -> None:
    while job.state.outcome is None and any(node.phase is NodePhase.LOST for node in job.state.nodes.values()):
        deadline = next_deadline(job.whole, job.job, job.now)
        assert deadline is not None
        job.wait(deadline - job.now)


@pytest.mark.parametrize("nodes", ["1", "2", "5", "2:4"])
def test_each_try_counts_once_however_many_nodes_there_are(nodes: str):
    job = Scenario(nodes)
    phases: set[JobPhase] = set()
    for tries in range(1, 4):
        fail_together(job)
        assert len(job.state.restarts) == job.state.memory.failures_without_progress == tries
        phases.add(job.state.phase)
        wait_for_replacements(job)
        phases.add(job.state.phase)
    fail_together(job)
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 1
    assert "no progress over 3 restarts" in job.state.outcome.reason
    assert job.now - job.state.started_at < SOON
    assert phases == {JobPhase.RECOVERING}
    assert len(job.state.incidents) == 1


def test_the_incident_says_what_is_done_about_it():
    job = Scenario("2")
    fail_together(job)
    [incident] = job.state.incidents
    assert incident.rule.startswith("failed-start/1")
    assert incident.action == "replace the node and start its command again"


def test_one_that_is_killed_each_time_uses_up_the_restarts():
    job = Scenario("2", retry={"max_restarts": 2})
    for _ in range(3):
        fail_together(job, 137)
        wait_for_replacements(job)
    assert job.state.outcome is not None
    assert "2 restarts within" in job.state.outcome.reason
    assert job.state.outcome.exit_code == 3
    assert job.state.memory.failures_without_progress == 0


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_an_exit_code_that_is_fatal_stops_at_once_and_says_why(nodes: str):
    job = Scenario(nodes)
    fail_together(job, 2)
    assert job.state.outcome is not None
    assert "retry.fatal_exit_codes: programs exit with it when called with wrong arguments" in job.state.outcome.reason


def test_one_that_comes_to_the_rendezvous_at_last_begins_the_job():
    job = Scenario("2")
    fail_together(job)
    wait_for_replacements(job)
    job.running()
    assert job.state.phase is JobPhase.RUNNING
    assert job.state.incidents[-1].failure is FailureClass.USER_CODE
    assert job.state.incidents[-1].stepping_at == job.now
