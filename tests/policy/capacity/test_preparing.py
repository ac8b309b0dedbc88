"""Tests of commands that work for long before their torchrun: they install, download, or prepare data."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import FailureClass, JobPhase, LossCause
from perdure.contract.transitions import NodeCommanded, NodeCreated, NodeJoined, NodeLost, NodeUnreachable
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.checked import CheckedScenario
from tests.policy.scenario import Scenario

JOIN_TIMEOUT = timedelta(minutes=10)
ENTER_TIMEOUT = timedelta(minutes=5, seconds=4)
A_LONG_TIME = timedelta(hours=20)
WORKS = "its command runs and has not started its torchrun yet; only limits.active_deadline ends that"


def prepare(job: Scenario, *ranks: int) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodeJoined, preparing=True)
    return job


def joined(job: Scenario, *ranks: int) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodeJoined, address=f"10.0.0.{rank}", host=f"host-{rank}")
    return job


def test_commands_that_work_before_their_first_torchrun_are_waited_for() -> None:
    job = joined(CheckedScenario("2"), 0, 1).wait(timedelta(minutes=1))
    prepare(job, 0, 1).wait(A_LONG_TIME)
    assert (job.state.outcome, job.state.phase) == (None, JobPhase.STARTING)
    assert job.state.reason == f"0 of 2 nodes are ready; node 0: {WORKS}"
    assert next_action(job.state, job.job) == f"waits for node 0 (joined: {WORKS})"
    job.ready(0).wait(JOIN_TIMEOUT * 2).ready(1).steps()
    assert (job.generation, job.state.phase) == (1, JobPhase.RUNNING)
    assert (job.state.restarts, job.state.incidents) == ((), ())


def test_a_node_that_never_joins_is_not_waited_for_longer_because_another_one_works() -> None:
    job = prepare(joined(CheckedScenario("2"), 0), 0).wait(JOIN_TIMEOUT)
    assert job.state.outcome is not None
    assert "timing.rendezvous.join_timeout" in job.state.outcome.reason


def test_a_command_that_joined_and_does_not_say_that_it_works_is_bounded() -> None:
    job = joined(CheckedScenario("2"), 0, 1).wait(JOIN_TIMEOUT)
    assert job.state.outcome is not None


def test_an_active_deadline_ends_a_command_that_works_for_too_long() -> None:
    job = joined(CheckedScenario("1", limits={"active_deadline": "1h"}), 0)
    prepare(job, 0).wait(timedelta(hours=1))
    assert job.state.outcome is not None
    assert "limits.active_deadline" in job.state.outcome.reason


def test_a_command_that_fails_after_a_long_time_gives_its_successor_a_whole_wait() -> None:
    job = joined(CheckedScenario("2"), 0, 1)
    prepare(job, 0, 1).wait(timedelta(hours=1)).command_exited(1, generation=0)
    assert job.state.outcome is None
    assert len(job.state.restarts) == 1
    assert not job.node(1).preparing
    job.transition(1, NodeCreated)
    job.wait(JOIN_TIMEOUT - timedelta(minutes=1))
    assert job.state.outcome is None
    assert job.wait(timedelta(minutes=1)).state.outcome is not None


def test_a_job_that_lost_a_node_waits_for_a_replacement_that_works() -> None:
    job = prepare(joined(CheckedScenario("2"), 0, 1), 0, 1).ready(0, 1).steps()
    job.lost(1)
    joined(job, 1)
    # The others do not start their ranks before the replacement has come to its torchrun.
    assert job.generation == 1
    prepare(job, 1).wait(A_LONG_TIME)
    assert (job.state.outcome, job.generation, job.incarnations) == (None, 1, {0: 1, 1: 2})
    assert f"node 1 (joined: {WORKS})" in next_action(job.state, job.job)
    assert job.ready(1).steps().generation == 2


def test_a_member_whose_command_works_has_not_missed_its_world() -> None:
    job = Scenario("2").ready(0, 1).steps(0)
    for asked in range(1, 5):
        job.wait(ENTER_TIMEOUT)
        assert desires_of(job.state)[0].inquiry == asked
        answer(job, preparing=True)
    assert job.generation == 1
    assert job.state.reason == f"generation 1 with 2 nodes is starting; node 1: {WORKS}"
    assert next_deadline(job.whole, job.job, job.now) is not None
    # It has come to its torchrun just now, and takes a moment to enter.
    job.wait(ENTER_TIMEOUT)
    answer(job, preparing=False)
    assert (job.generation, job.node(1).reason) == (1, "")
    job.steps()
    assert job.state.incidents == ()


def test_a_torchrun_that_does_not_enter_after_its_command_has_worked_is_started_again() -> None:
    job = Scenario("2").ready(0, 1).steps(0).wait(ENTER_TIMEOUT)
    answer(job, preparing=True)
    for _ in range(2):
        job.wait(ENTER_TIMEOUT)
        answer(job, preparing=False)
    assert job.state.incidents[-1].failure is FailureClass.RENDEZVOUS_TIMEOUT
    assert job.generation == 2


@pytest.mark.parametrize("how", ["lost", "unreachable"])
def test_a_node_that_is_away_does_not_work_as_far_as_is_known(how: str) -> None:
    job = prepare(joined(CheckedScenario("2"), 0, 1), 0, 1).wait(timedelta(hours=1))
    if how == "lost":
        job.transition(1, NodeLost, detail="killed", cause=LossCause.MACHINE)
    else:
        job.transition(1, NodeUnreachable, detail="its agent stopped renewing its lease")
    assert job.state.outcome is None
    assert job.wait(JOIN_TIMEOUT).state.outcome is not None


def answer(job: Scenario, *, preparing: bool) -> None:
    job.transition(
        1,
        NodeCommanded,
        generation=job.generation,
        entered=0,
        inquiry=job.state.inquiry,
        preparing=preparing,
        detail="its command has not reached its torchrun",
    )
