"""Tests of nodes that the backend cannot create: refusals of an API server, an admission rule or a permission.

A refusal is like bad weather. A world that trains is left alone, and the node is requested again; a job with too few
nodes waits for as long as its specification says, and then stops with the reason.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.cli.explain import explanation
from perdure.cli.text import incident_line
from perdure.contract import EvidenceSource, FailureClass, JobPhase, LossCause, Stop
from perdure.contract.transitions import NodeCreated, NodeCreateFailed, NodePending
from perdure.workflows.policy.record.projections import status_of
from tests.policy.scenario import Scenario

FORBIDDEN = "the API server forbids it: ValidatingAdmissionPolicy 'freeze' denied request: no pods today"
INVALID = "the API server rejects it: spec.containers[0].image: Invalid value"


def refused(job: Scenario, rank: int, reason: str = FORBIDDEN) -> Scenario:
    """The backend tries again."""
    facts = {"detail": reason, "absent": True, "source": EvidenceSource.BACKEND}
    return job.transition(rank, NodePending, **facts)


def refused_for_good(job: Scenario, rank: int, reason: str = INVALID, cause: LossCause = LossCause.UNKNOWN) -> Scenario:
    """The backend does not try this incarnation again."""
    return job.transition(rank, NodeCreateFailed, detail=reason, cause=cause)


def shrunk(**spec: object) -> Scenario:
    """A job that has lost node 1 and trains with node 0."""
    return Scenario("1:2", **spec).running().wait(60).lost(1).steps()


def known(job: Scenario):
    return status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)


@pytest.mark.parametrize("cause", [LossCause.UNKNOWN, LossCause.JOB])
def test_a_world_that_has_enough_nodes_trains_on_however_often_a_replacement_is_refused(cause: LossCause):
    job = shrunk()
    generation = job.generation
    for _ in range(20):
        refused_for_good(job, 1, cause=cause).wait(timedelta(minutes=5))
    assert job.state.outcome is None
    assert (job.state.phase, job.generation) == (JobPhase.RUNNING, generation)
    assert known(job).restarts == 0, "only the loss was a restart, and its window is over"
    assert job.state.memory.failures_without_progress == 0


def test_a_node_that_is_refused_is_requested_with_growing_pauses():
    job = shrunk()
    pauses: list[float] = []
    for _ in range(9):
        began = job.now
        refused_for_good(job, 1)
        while 1 not in job.incarnations and job.now - began < timedelta(hours=1):
            job.wait(1)
        pauses.append((job.now - began).total_seconds())
    assert pauses == [0, 5, 10, 20, 40, 80, 160, 300, 300]


@pytest.mark.parametrize("refuse", [refused, refused_for_good])
def test_a_refusal_beside_a_world_that_trains_is_told_and_an_entry_of_its_own(refuse):
    job = refuse(shrunk(), 1).wait(40)
    [lost, entry] = job.state.incidents
    assert lost.failure is FailureClass.NODE_LOST
    assert entry.title == "node 1 cannot be created"
    assert entry.over_at is None
    status = known(job)
    assert status.uncreated == (1,)
    [warning] = status.warnings
    assert warning.startswith("node 1 cannot be created since 2026-01-01 00:01:00 UTC, and is requested again: the API")
    told = explanation(entry, job="job", flag="").plain
    assert "nothing was interrupted: the world trains without it" in told
    assert "docs/kubernetes.md" in told
    if 1 not in job.incarnations:
        job.wait(300)
    job.transition(1, NodeCreated)
    entry = job.state.incidents[-1]
    assert entry.title.startswith("node 1 could not be created for ")
    assert entry.over_at == job.now
    assert not known(job).uncreated
    assert not known(job).warnings
    assert incident_line(entry).endswith(": it was requested again, with growing pauses")
    job.ready(1).steps()
    assert job.state.phase is JobPhase.RUNNING
    assert job.generation == 3


def test_nodes_that_are_refused_together_are_one_entry():
    job = Scenario("1:4").running().wait(60)
    job.lost_together(1, 2, 3).steps()
    for rank in (1, 2, 3):
        refused(job, rank)
    job.wait(30)
    entry = job.state.incidents[-1]
    assert entry.title == "nodes 1, 2, 3 cannot be created"
    assert [one.rank for one in entry.evidence] == [1, 2, 3]
    for rank in (1, 2, 3):
        job.transition(rank, NodeCreated)
    assert job.state.incidents[-1].title == "nodes 1, 2, 3 could not be created for 30s"
    assert len(job.state.incidents) == 2


@pytest.mark.parametrize("refuse", [refused, refused_for_good])
def test_below_the_minimum_it_waits_as_long_as_recovery_says_and_stops_with_the_reason(refuse):
    job = Scenario("2", recovery={"replace_timeout": "4m"}).running().wait(60).lost(1)
    began = job.now
    refuse(job, 1)
    while job.state.outcome is None and job.now - began < timedelta(hours=1):
        if 1 in job.incarnations:
            refuse(job, 1)
        job.wait(1)
    assert job.now - began == timedelta(minutes=4)
    outcome = job.state.outcome
    assert outcome is not None
    assert outcome.exit_code == 3
    assert "recovery.replace_timeout" in outcome.reason
    assert "node 1: the API server " in outcome.reason
    [incident] = job.state.incidents
    assert incident.failure is FailureClass.CREATE_FAILED
    assert incident.rule.startswith("refused/2")
    assert incident.actions == (Stop(reason=outcome.reason, exit_code=3),)
    assert incident.action == "stop the job"
    for ended in (None, JobPhase.FAILED):
        told = explanation(incident, job="job", flag="", ended=ended).plain
        assert "nothing to do" not in told
        assert "then start the job again" in told


def test_a_refusal_that_ends_in_time_lets_the_job_continue():
    job = Scenario("2").running().wait(60).lost(1)
    refused(job, 1).wait(timedelta(minutes=9))
    assert job.state.phase is JobPhase.WAITING
    assert "forbids it" in job.state.reason
    job.ready(1).steps()
    assert job.state.phase is JobPhase.RUNNING
    [incident] = job.state.incidents
    assert incident.failure is FailureClass.NODE_LOST
    assert "no pods today" in incident.waited_for


def test_where_capacity_loss_waits_it_continues_with_fewer_nodes_in_the_end():
    spec = {"recovery": {"on_capacity_loss": "wait", "replace_timeout": "4m"}}
    job = refused(Scenario("1:2", **spec).running().wait(60).lost(1), 1).wait(239)
    assert job.generation == 1
    assert job.wait(1).generation == 2
    assert job.steps().state.phase is JobPhase.RUNNING
    assert job.state.incidents[-1].title == "node 1 cannot be created"


def test_a_job_that_scales_beyond_what_is_allowed_trains_on():
    job = Scenario("1:2").running().wait(60)
    job.state = job.state.replace(nodes_max=3)
    job.wait(0)
    refused_for_good(job, 2, "roles.worker: the site's policy allows 2 nodes")
    assert job.wait(timedelta(hours=1)).state.phase is JobPhase.RUNNING


def test_a_refusal_does_not_add_to_the_restarts_of_a_world_that_breaks_later():
    job = refused_for_good(shrunk(), 1)
    job.rank_killed(0)
    assert job.state.outcome is None
    assert job.incident.failure is FailureClass.KILLED


def test_the_first_nodes_are_waited_for_unless_the_refusal_is_final():
    job = refused(Scenario("2"), 0)
    assert job.state.outcome is None
    assert "node 0: the API server forbids it" in job.state.reason
    job.wait(timedelta(minutes=10))
    assert job.state.outcome is not None
    assert "timing.rendezvous.join_timeout" in job.state.outcome.reason
    assert "no pods today" in job.state.outcome.reason
    job = refused_for_good(Scenario("2"), 0)
    assert job.state.outcome is not None
    assert job.state.outcome.reason == f"node 0 was refused: {INVALID}"
