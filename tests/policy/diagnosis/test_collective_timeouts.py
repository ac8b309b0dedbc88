"""Tests of ranks that wait in a collective for another one until torch's timeout ends them: the other one hangs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, NodePhase, RankExit
from perdure.contract.transitions import NodeStalled
from tests.policy.scenario import Scenario, reported

TIMEOUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for "
    "recv operation to complete"
)


def waits_in_vain(job: Scenario, rank: int, *ranks: int, **fields: Any) -> None:
    """These global ranks of a node time out; by default its only one."""
    assert job.state.world is not None
    first = job.state.world.members[rank].base_rank
    exits = (
        RankExit(local_rank=number - first, global_rank=number, exit_code=1, error=TIMEOUT)
        for number in ranks or (first,)
    )
    job.take(job.failure(rank, ranks=tuple(exits), **fields))


def told(job: Scenario) -> str:
    return explanation(job.incident, job="llama", flag="").plain


def test_the_node_that_reports_no_timeout_is_suspected_and_no_confidence_is_claimed():
    job = Scenario("3").running()
    waits_in_vain(job, 0)
    job.peer_failed(2).wait(job.job.timing.rendezvous.victim_grace)
    assert job.generation == 2
    assert job.incident.failure is FailureClass.COLLECTIVE_TIMEOUT
    assert (job.incident.culprit, [one.rank for one in job.incident.suspects]) == (None, [1])
    assert job.incident.title.startswith("a collective timed out, node 1 may hang")
    text = told(job)
    assert "suspected: node 1 (rank 1 reported no timeout of its own)" in text
    assert "low confidence" in text
    assert "went away" not in text
    assert "nothing to do" not in text
    assert "perdure logs llama --node 1" in text


def test_one_that_stopped_stepping_before_the_others_is_suspected_with_more_confidence():
    job = Scenario("3").running()
    now = job.now
    for rank, since in ((0, 10), (1, 5), (2, 10)):
        job.transition(rank, NodeStalled, generation=1, time=now + timedelta(seconds=since))
    job.wait(timedelta(minutes=30))
    waits_in_vain(job, 0)
    waits_in_vain(job, 2)
    job.wait(job.job.timing.rendezvous.victim_grace)
    [suspect] = job.incident.suspects
    assert (suspect.rank, suspect.stalled_first) == (1, True)
    assert "stopped stepping before the others); fair confidence" in told(job)


def test_many_reports_of_those_that_waited_make_nothing_sure():
    """All stall together, and their agents report it: that says nothing about who began it."""
    job = Scenario("3").running()
    for rank in range(3):
        job.transition(rank, NodeStalled, generation=1)
    job.wait(timedelta(minutes=30))
    for rank in range(3):
        waits_in_vain(job, rank)
    assert job.incident.suspects == ()
    assert "no node is known to hang" in job.incident.title
    assert "low confidence" in told(job)


def test_a_rank_among_others_of_its_node_is_named():
    job = Scenario("2").ready(0, 1, processes=4).steps()
    waits_in_vain(job, 0, 0, 1, 2, 3)
    waits_in_vain(job, 1, 4, 6, 7)
    assert [(one.rank, one.ranks) for one in job.incident.suspects] == [(1, (5,))]
    assert "suspected: node 1 (rank 5 reported no timeout of its own)" in told(job)


def test_a_late_report_of_a_suspect_clears_it():
    job = Scenario("3").running()
    waits_in_vain(job, 0)
    waits_in_vain(job, 2)
    job.wait(job.job.timing.rendezvous.victim_grace)
    assert [one.rank for one in job.incident.suspects] == [1]
    waits_in_vain(job, 1, generation=1)
    assert job.incident.suspects == ()


def test_one_that_failed_by_itself_is_the_culprit_and_no_hang_is_claimed():
    job = Scenario("2").running()
    waits_in_vain(job, 0)
    job.rank_killed(1)
    assert (job.incident.failure, job.incident.culprit) == (FailureClass.KILLED, 1)
    assert job.incident.suspects == ()


def test_a_broken_connection_without_a_culprit_is_told_with_low_confidence():
    job = Scenario("2").running().transition(0, NodeStalled, generation=1).wait(1800)
    job.peer_failed(0).peer_failed(1)
    assert job.incident.failure is FailureClass.PEER_LOST
    assert "low confidence" in told(job)


def hangs_at(job: Scenario, step: int) -> None:
    waits_in_vain(job, 0, progress=reported(step))
    job.wait(job.job.timing.rendezvous.victim_grace)


def test_a_node_that_is_suspected_again_without_a_gain_is_replaced():
    job = Scenario("2").running()
    hangs_at(job, 100)
    job.steps()
    assert job.incarnations == {0: 1, 1: 1}
    hangs_at(job, 100)
    assert job.incident.rule.startswith("collective-timeout/2")
    assert (job.node(1).incarnation, job.node(1).phase) == (2, NodePhase.REQUESTED)


@pytest.mark.parametrize("spec", [{"recovery": {"on_capacity_loss": "fail"}}, {"backend": "joined"}])
def test_a_suspicion_costs_no_node_that_is_not_replaced(spec: dict[str, Any]):
    job = Scenario("2", **spec).running()
    for _ in range(2):
        hangs_at(job, 100)
        job.steps()
    assert job.incarnations == {0: 1, 1: 1}
    assert job.state.outcome is None


def test_one_that_gains_steps_is_restarted_in_place_again():
    job = Scenario("2").running()
    for step in (100, 200, 300, 400, 500):
        hangs_at(job, step)
        job.steps()
    assert job.incarnations == {0: 1, 1: 1}
    assert job.state.memory.failures_without_progress == 0


def test_a_hang_at_the_same_step_again_and_again_stops_the_job():
    job = Scenario("2", recovery={"on_capacity_loss": "fail"}).running()
    for _ in range(4):
        hangs_at(job, 100)
        job.steps()
    assert job.state.outcome is None
    hangs_at(job, 100)
    assert job.state.outcome is not None
    assert job.state.outcome.reason.startswith("no progress over 3 restarts")
    assert job.state.outcome.exit_code == 3
