"""A member that falls silent long after its world has stopped: what it has in memory may be all that is left."""

from __future__ import annotations

from datetime import timedelta

from perdure.contract import JobPhase
from perdure.contract.transitions import NodeJoined, NodeReachable, NodeUnreachable
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.facts.events import RestartRequested
from perdure.workflows.policy.timers import next_deadline
from tests.policy.checked import CheckedScenario
from tests.policy.scenario import Scenario


def waits_for_a_replacement(*, nodes: str = "3", lost: int = 1) -> Scenario:
    """A job whose world stopped a minute ago; its members keep its state in memory."""
    job = Scenario(nodes).running().lost(lost).wait(60)
    assert (job.generation, job.state.phase) == (1, JobPhase.WAITING)
    return job


def outage_ends(job: Scenario, *ranks: int) -> None:
    """The leases of these nodes have ended, and their agents poll again within 10 s."""
    for rank in ranks:
        job.transition(rank, NodeUnreachable, detail="its agent did not take its lease")


def test_an_outage_while_a_replacement_is_awaited_replaces_no_survivor():
    job = waits_for_a_replacement()
    outage_ends(job, 0, 2)
    assert job.wait(10).incarnations == {0: 1, 1: 2, 2: 1}
    job.transition(0, NodeReachable).transition(2, NodeReachable).transition(1, NodeJoined)
    assert job.generation == 2
    assert job.steps().incarnations == {0: 1, 1: 2, 2: 1}


def test_a_survivor_that_alone_stays_silent_is_given_up_once_its_agent_had_time_to_poll():
    job = waits_for_a_replacement()
    outage_ends(job, 2)
    assert job.wait(14.9).incarnations[2] == 1
    assert job.wait(0.2).incarnations == {0: 1, 1: 2, 2: 2}


def test_survivors_of_which_none_is_heard_are_waited_for_as_long_as_a_machine_takes_to_be_called_silent():
    job = waits_for_a_replacement(nodes="2")
    outage_ends(job, 0)
    patience = job.job.timing.processes.presumed_gone
    assert job.wait(patience - timedelta(seconds=0.1)).incarnations == {0: 1, 1: 2}
    assert job.wait(0.2).incarnations == {0: 2, 1: 2}


def test_survivors_are_judged_by_the_one_that_is_heard_again():
    job = waits_for_a_replacement()
    outage_ends(job, 0, 2)
    job.wait(5).transition(0, NodeReachable)
    assert job.wait(9.9).incarnations[2] == 1
    assert job.wait(0.2).incarnations == {0: 1, 1: 2, 2: 2}


def test_a_machine_that_fell_silent_with_its_world_is_given_up_at_once():
    job = Scenario("3").running().lost(2).wait(10).transition(1, NodeUnreachable)
    assert job.incarnations == {0: 1, 1: 2, 2: 2}


def test_machines_that_fell_silent_with_their_world_are_given_up_together():
    job = CheckedScenario("3").running()
    job.take(RestartRequested(reason="")).transition(1, NodeUnreachable).transition(2, NodeUnreachable)
    job.lost(0).wait(job.job.timing.lease.timeout)
    assert job.incarnations == {0: 2, 1: 2, 2: 2}


def test_a_survivor_that_falls_silent_in_a_pause_before_a_restart_is_kept():
    job = Scenario("2", retry={"no_progress_limit": 10}).ready(0, 1)
    for _ in range(4):
        job.rank_killed(0).wait(25)
    job.rank_killed(0)
    assert (job.generation, next_deadline(job.whole, job.job, job.now)) == (5, job.now + timedelta(seconds=40))
    outage_ends(job.wait(39), 1)
    assert job.wait(5).incarnations == {0: 1, 1: 1}
    assert job.transition(1, NodeReachable).generation == 6


def test_a_run_of_the_release_before_decides_as_it_did():
    job = waits_for_a_replacement()
    job.state = job.state.replace(behavior=Behavior.RELEASE_0_3)
    outage_ends(job, 2)
    assert job.incarnations == {0: 1, 1: 2, 2: 2}
