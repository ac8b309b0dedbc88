"""Tests of nodes whose command waits until what its script has saved is restored."""

from __future__ import annotations

from datetime import timedelta

from perdure.contract import JobPhase
from perdure.contract.transitions import NodeJoined, NodeReachable, NodeUnreachable
from perdure.workflows.policy.record.projections import warnings_of
from tests.policy.checked import CheckedScenario

WAITS = "its command waits since 12:00:00 UTC until /saves is restored from s3://bucket: timed out"


def test_the_node_is_named_until_it_waits_no_longer() -> None:
    job = CheckedScenario("2")
    for rank in (0, 1):
        job.transition(rank, NodeJoined, address=f"10.0.0.{rank}", host=f"host-{rank}")
    job.transition(1, NodeJoined, waits=WAITS)
    assert warnings_of(job.state, job.job) == (f"node 1: {WAITS}",)
    assert (job.state.phase, job.state.reason) == (JobPhase.STARTING, f"0 of 2 nodes are ready; node 1: {WAITS}")
    # Its agent was away for a moment.
    job.transition(1, NodeUnreachable, detail="silent")
    job.transition(1, NodeReachable)
    assert job.node(1).reason == WAITS
    job.transition(1, NodeJoined, waits="")
    assert warnings_of(job.state, job.job) == ()
    assert job.node(1).reason == ""
    job.ready(0).ready(1).steps()
    assert job.state.phase is JobPhase.RUNNING


def test_it_does_not_wait_longer_than_for_other_nodes_and_the_reason_is_in_the_result() -> None:
    job = CheckedScenario("2").ready(0)
    job.transition(1, NodeJoined, waits=WAITS)
    job.wait(timedelta(minutes=10))
    assert job.state.outcome is not None
    assert f"timing.rendezvous.join_timeout), and nodes.min is 2; node 1: {WAITS}" in job.state.outcome.reason


def test_a_replacement_that_waits_is_what_the_incident_waits_for() -> None:
    job = CheckedScenario("2").ready(0, 1).steps()
    job.lost(1)
    job.transition(1, NodeJoined, waits=WAITS)
    assert job.state.open_incident is not None
    assert job.state.open_incident.waited_for == f"node 1: {WAITS}"
    job.ready(0, 1).steps()
    assert warnings_of(job.state, job.job) == ()


def test_many_are_counted() -> None:
    job = CheckedScenario("20")
    for rank in range(20):
        job.transition(rank, NodeJoined, waits=WAITS)
    *others, last = warnings_of(job.state, job.job)
    assert len(others) == 7
    assert last == "13 more nodes wait: `perdure nodes` names them"
