"""Tests of nodes that are ended on purpose: drained, evicted, preempted. They count in no budget."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, JobPhase, LossCause
from perdure.workflows.policy.record.projections import result_of, status_of
from tests.policy.scenario import Scenario, counted

DRAINED = "evicted, as a drain of its machine does (EvictionByEvictionAPI: Eviction API: evicting)"


def drained(job: Scenario, rank: int) -> Scenario:
    return job.lost(rank, DRAINED, LossCause.WANTED)


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_rolling_upgrade_that_meets_a_job_again_and_again_does_not_end_it(nodes: str):
    job = Scenario(nodes).running()
    for turn in range(30):
        drained(job.wait(timedelta(minutes=2)), turn % 2)
        job.ready(turn % 2).steps()
    assert job.state.outcome is None
    assert job.state.phase is JobPhase.RUNNING
    known = status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)
    assert (known.restarts, known.restarts_total) == (0, 0)
    assert job.incident.failure is FailureClass.DISRUPTED
    told = explanation(job.incident, job="job", flag="").plain
    assert "the node was ended on purpose: deleted, drained, evicted or preempted" in told
    assert "it counts in no budget" in told
    job.finish(0, 1)
    assert result_of(job.state, job.now).restarts == 0


def test_a_preemption_is_named_and_counts_in_no_budget():
    job = Scenario("2", retry={"max_restarts": 3}).running()
    for _ in range(10):
        job.wait(timedelta(minutes=1)).lost(1, "preempted by a pod of higher priority", LossCause.PREEMPTED)
        assert job.incident.failure is FailureClass.PREEMPTED
        assert job.incident.title == "node 1 preempted, replacement requested"
        job.ready(1).steps()
    assert job.state.outcome is None
    assert not job.state.losses


def test_an_eviction_by_its_machine_is_named_and_counts_as_a_loss():
    job = Scenario("2", backend="kubernetes", retry={"max_restarts": 3}).running()
    for _ in range(3):
        job.wait(timedelta(minutes=1)).lost(1, "its machine evicted it", LossCause.EVICTED)
        assert job.incident.failure is FailureClass.EVICTED
        job.ready(1).steps()
    assert {loss.host for loss in job.state.losses} == {"host-1"}
    job.wait(timedelta(minutes=1)).lost(1, "its machine evicted it", LossCause.EVICTED)
    assert job.state.outcome is not None
    assert "3 restarts within" in job.state.outcome.reason


def test_a_preemption_that_only_its_agent_reports_counts_in_no_budget_either():
    job = Scenario("2").running()
    for _ in range(30):
        job.wait(timedelta(minutes=1)).ended_from_outside(1).peer_failed(0).wait(7)
        assert job.incident.failure is FailureClass.DISRUPTED
        job.ready(0, 1).steps()
    assert job.state.outcome is None


def test_a_node_whose_backend_knows_another_reason_than_its_agent_is_lost():
    job = Scenario("2", retry={"max_restarts": 3}).running()
    for _ in range(4):
        assert job.state.outcome is None
        job.wait(timedelta(minutes=1)).ended_from_outside(1).lost(1, "its machine evicted it (Evicted: low on memory)")
        assert job.incident.failure is FailureClass.NODE_LOST
        if job.state.outcome is None:
            job.removed(1).ready(0, 1).steps()
    assert job.state.outcome is not None
    assert "3 restarts within" in job.state.outcome.reason


def test_a_loss_beside_a_disruption_counts():
    job = Scenario("3").running()
    drained(job, 1).lost(2)
    assert job.incident.failure is FailureClass.NODE_LOST
    assert job.incident.title == "node 2 lost, node 1 disrupted, replacement requested"
    assert len(job.state.restarts) == 1


def test_a_disruption_does_not_hide_a_script_that_fails():
    job = Scenario("2").running()
    for _ in range(4):
        job.rank_raised(0, progress=counted(5)).steps()
        drained(job, 1).ready(1).steps()
        assert job.state.outcome is None
    job.rank_raised(0, progress=counted(5))
    assert job.state.outcome is not None
    assert "no progress" in job.state.outcome.reason


def test_a_job_that_stops_at_the_loss_of_capacity_stops():
    job = drained(Scenario("1:2", recovery={"on_capacity_loss": "fail"}).running(), 1)
    assert job.state.outcome is not None
