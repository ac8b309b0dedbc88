"""Tests of members that do not report that they entered their world."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import FailureClass, JobPhase, NodePhase
from perdure.contract.transitions import NodeCommanded, NodeJoined, NodeReady, NodeUnreachable, NodeUnresponsive
from perdure.workflows.policy.facts.events import RelaunchRequested, RestartRequested
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.checked import CheckedScenario
from tests.policy.scenario import START, Scenario

LATE = timedelta(minutes=5, seconds=4)


def answer(job: Scenario, rank: int, *, entered: int) -> None:
    job.transition(
        rank,
        NodeCommanded,
        generation=job.generation,
        entered=entered,
        inquiry=job.state.inquiry,
        detail="command ended",
    )


def asks(job: Scenario) -> int:
    return desires_of(job.state)[0].inquiry


def test_no_node_is_asked_before_its_time_or_once_all_step():
    job = Scenario("2").ready(0, 1)
    assert next_deadline(job.whole, job.job, job.now) == job.now + LATE
    job.wait(LATE - timedelta(seconds=1))
    assert asks(job) == 0
    job.steps()
    assert next_deadline(job.whole, job.job, job.now) is None
    assert asks(job) == 0


def test_one_whose_command_does_not_run_is_started_again():
    job = Scenario("2").ready(0, 1).steps(0).wait(LATE)
    assert asks(job) == 1
    assert job.generation == 1
    answer(job, 1, entered=0)
    assert job.generation == 2
    assert job.state.incidents[-1].failure is FailureClass.RENDEZVOUS_TIMEOUT
    assert "has not entered it: command ended" in job.state.incidents[-1].title
    assert job.state.world is not None
    assert job.state.world.members[1].restart_command
    job.wait(LATE)
    answer(job, 1, entered=0)
    assert job.node(1).incarnation == 2


def test_a_first_step_may_take_as_long_as_it_takes():
    job = Scenario("2").ready(0, 1).wait(LATE)
    answer(job, 0, entered=1)
    answer(job, 1, entered=1)
    assert next_deadline(job.whole, job.job, job.now) is None
    job.wait(timedelta(hours=5))
    # It is too busy to take a command in time.
    job.transition(1, NodeUnresponsive, generation=1, detail="late")
    assert (job.generation, asks(job)) == (1, 1)
    assert job.steps().state.phase is JobPhase.RUNNING


def test_a_question_that_gets_no_answer_is_asked_again():
    job = Scenario("2").ready(0, 1).wait(3 * LATE)
    assert asks(job) == 3
    assert job.generation == 1


@pytest.mark.parametrize("when", ["before it is asked", "after it has entered"])
def test_one_that_is_silent_is_given_up(when: str):
    job = Scenario("2").ready(0, 1)
    if when == "after it has entered":
        job.wait(LATE)
        answer(job, 0, entered=1)
        answer(job, 1, entered=1)
        job.wait(timedelta(hours=1))
    job.transition(1, NodeUnreachable, detail="its agent stopped renewing its lease")
    assert job.node(1).alive
    job.wait(LATE)
    assert (job.node(1).incarnation, job.node(1).phase) == (2, NodePhase.REQUESTED)
    assert job.state.incidents[-1].failure is FailureClass.NODE_UNRESPONSIVE


def test_one_that_steps_is_not_given_up_for_its_silence():
    job = Scenario("2").running()
    job.transition(1, NodeUnreachable, detail="silent")
    job.wait(10 * LATE)
    assert job.incarnations == {0: 1, 1: 1}
    assert next_deadline(job.whole, job.job, job.now) is None


def test_a_job_that_was_away_itself_listens_before_it_gives_up_anybody():
    job = Scenario("2").ready(0, 1)
    job.transition(1, NodeUnreachable, detail="silent")
    job.now += timedelta(hours=1)
    job.wait(timedelta(seconds=10))
    assert job.node(1).incarnation == 1
    job.steps()
    assert job.state.phase is JobPhase.RUNNING


def test_an_answer_to_an_older_question_or_of_an_older_agent_proves_nothing():
    job = Scenario("2").ready(0, 1)
    job.transition(1, NodeCommanded, generation=1, entered=0)
    job.wait(LATE)
    job.transition(1, NodeCommanded, generation=1, entered=0)
    job.transition(1, NodeCommanded, generation=1, inquiry=1)
    assert job.generation == 1


def test_a_limit_of_zero_turns_it_off():
    job = Scenario("2", timing={"rendezvous": {"enter_timeout": "0s"}}).ready(0, 1)
    assert next_deadline(job.whole, job.job, job.now) is None


def test_a_request_does_not_wait_for_a_silent_member_of_a_world_that_is_broken():
    job = Scenario("2").running()
    job.transition(0, NodeUnreachable, detail="silent")
    job.take(RelaunchRequested(rank=1))
    job.ready(1)
    assert (job.generation, job.node(0).incarnation) == (1, 1)
    job.wait(job.job.timing.lease.timeout)
    assert job.node(0).incarnation == 2
    assert job.state.incidents[-1].failure is FailureClass.NODE_UNRESPONSIVE
    # Its predecessor's ranks may still run: the replacement enters once they are presumed gone.
    assert job.ready(0).wait(timedelta(minutes=5)).generation == 2


def test_a_request_waits_for_a_silent_member_while_the_others_train():
    job = Scenario("2").running()
    job.transition(0, NodeUnreachable, detail="silent")
    job.take(RestartRequested())
    job.wait(timedelta(hours=1))
    assert (job.generation, job.node(0).incarnation) == (1, 1)
    job.peer_failed(1).wait(timedelta(minutes=1))
    assert job.node(0).incarnation == 2


def test_nodes_that_offer_no_port_are_not_waited_for_without_end():
    job = Scenario("2")
    for rank in (0, 1):
        job.transition(rank, NodeJoined, address=f"10.0.0.{rank}")
        job.transition(rank, NodeReady)
    assert job.generation == 0
    deadline = next_deadline(job.whole, job.job, job.now)
    assert deadline == job.now + job.job.timing.rendezvous.join_timeout
    job.wait(job.job.timing.rendezvous.join_timeout)
    assert job.state.outcome is not None
    assert "none of them offers a port for its store" in job.state.outcome.reason


def test_a_last_call_that_is_over_does_not_begin_again_where_no_port_is_offered():
    job = CheckedScenario("1:2").transition(0, NodeJoined, address="10.0.0.0").transition(0, NodeReady)
    job.wait(job.job.timing.rendezvous.last_call)
    assert next_deadline(job.whole, job.job, job.now) == START + job.job.timing.rendezvous.join_timeout
