"""Golden tables of when a node's replacement may enter a world: not while its predecessor may still train."""

from __future__ import annotations

import pytest

from perdure.contract import JobPhase
from perdure.contract.transitions import NodeLost, NodeRemoved, NodeUnreachable, NodeUnresponsive
from perdure.workflows.policy.facts.events import RelaunchRequested, ResumeRequested, ScaleRequested, SuspendRequested
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.timers import next_deadline
from tests.policy.checked import CheckedScenario
from tests.policy.scenario import Scenario


def test_a_relaunched_node_waits_until_the_old_one_has_ended():
    job = Scenario("2").running().take(RelaunchRequested(rank=0))
    assert job.incarnations == {0: 2, 1: 1}, "its replacement is asked for at once, and starts beside it"
    job.ready(0).wait(20)
    assert job.generation == 1
    assert job.state.phase is JobPhase.WAITING
    assert "node 0: waits until incarnation 1 has ended, at most until 00:01:30 UTC" in job.state.reason
    assert next_action(job.state, job.job) == (
        "the next world waits until incarnation 1 of node 0, whose ranks may still save, has ended, at most until "
        "00:01:30 UTC"
    )
    job.removed(0)
    assert job.generation == 2
    assert job.steps().state.phase is JobPhase.RUNNING


def test_the_end_may_be_reported_before_the_replacement_is_ready():
    job = Scenario("2").running().take(RelaunchRequested(rank=0)).removed(0)
    assert job.ready(0).generation == 2


def test_the_watch_may_see_the_end_before_the_deletion_returns():
    job = Scenario("2").running().take(RelaunchRequested(rank=0)).ready(0)
    assert job.transition(0, NodeLost, incarnation=1).generation == 2
    assert job.removed(0).generation == 2


def test_after_a_request_the_others_of_an_elastic_job_wait_for_the_end_too():
    job = Scenario("1:2").running().take(RelaunchRequested(rank=0)).peer_failed(1).wait(5)
    assert job.generation == 1, "node 1 would become rank 0 while the old one may save"
    waits = "waits until incarnation 1 of node 0, whose ranks may still save, has ended, at most until 00:01:30 UTC"
    assert next_action(job.state, job.job) == f"the next world {waits}"
    assert job.state.phase is JobPhase.RECOVERING
    assert job.state.reason == f"replacement of node 0 requested by a user; {waits}"
    assert job.state.incidents[-1].waited_for == waits
    job.removed(0)
    assert (job.generation, job.group_ranks) == (2, {1: 0}), "they continue with fewer nodes as soon as that is known"
    job.steps().ready(0)
    assert job.group_ranks == {0: 1, 1: 0}


def test_after_a_failure_the_others_of_an_elastic_job_go_on_meanwhile():
    job = Scenario("2:3").running().rank_killed(1).transition(0, NodeUnreachable)
    job.transition(0, NodeUnresponsive, generation=2, detail="not taken")
    assert (job.generation, job.group_ranks) == (3, {1: 1, 2: 0})
    job.steps().ready(0).wait(20)
    assert job.generation == 3
    assert job.state.phase is JobPhase.RUNNING
    assert job.removed(0).group_ranks == {0: 2, 1: 1, 2: 0}


def test_a_world_shrinks_when_the_surplus_has_ended():
    job = Scenario("1:3").running().take(ScaleRequested(minimum=1, maximum=2))
    assert job.incarnations == {0: 1, 1: 1}, "its deletion is asked for at once"
    assert (job.generation, job.state.phase) == (1, JobPhase.RECOVERING)
    job.those_that_leave_end()
    assert (job.generation, job.group_ranks) == (2, {0: 0, 1: 1})
    assert not job.state.leaving


def test_a_world_waits_for_a_surplus_that_an_earlier_world_left_out():
    roles = {"worker": {"nodes": {"min": 2, "max": 6, "unit": 2}, "command": ["torchrun", "train.py"]}}
    job = CheckedScenario("2:6", roles=roles)
    job.running().lost(0).steps()
    assert job.group_ranks.keys() == {1, 2, 3, 4}
    job.take(RelaunchRequested(rank=2)).ready(0).take(ScaleRequested(minimum=2, maximum=2))
    assert {one.rank for one in job.state.leaving} == {2, 3, 4, 5}
    assert "of node 2 and 3 more" in job.incident.waited_for
    job.those_that_leave_end()
    assert job.group_ranks.keys() == {0, 1}


def test_a_silent_surplus_that_a_verdict_gives_up_on_delays_no_world():
    job = CheckedScenario("1:2")
    job.running().rank_killed(0).transition(1, NodeUnreachable)
    job.take(ScaleRequested(minimum=1, maximum=1)).transition(1, NodeUnresponsive, generation=2)
    assert (job.generation, job.group_ranks) == (3, {0: 0})


def test_a_surplus_that_says_nothing_is_presumed_gone_in_the_end():
    job = Scenario("1:3").running().take(ScaleRequested(minimum=1, maximum=2)).wait(89)
    assert job.generation == 1
    assert job.wait(1).generation == 2
    assert job.state.incidents[-1].waited_for == "nothing proved that incarnation 1 of node 2 has ended: presumed gone"


def test_a_failure_does_not_let_a_world_form_before_the_surplus_has_ended():
    job = Scenario("1:3").running().rank_raised(0, exit_code=None).take(ScaleRequested(minimum=1, maximum=2))
    assert job.steps(0, 1).generation == 2
    assert job.those_that_leave_end().generation == 3


def test_nodes_whose_ranks_have_finished_delay_no_world():
    job = Scenario("1:3").running().finish(2).take(ScaleRequested(minimum=1, maximum=2))
    assert (job.generation, job.group_ranks) == (2, {0: 0, 1: 1})


def test_what_is_left_of_a_resumed_job_waits_for_all_that_the_suspension_ended():
    job = Scenario("1:2").running().take(SuspendRequested()).transition(1, NodeRemoved)
    job.take(ResumeRequested()).ready(1).wait(10)
    assert job.state.world is None, "node 1 would become rank 0 while the old one may save"
    assert job.removed(0).wait(10).group_ranks == {1: 0}


def test_a_node_that_does_not_answer_is_presumed_gone_in_the_end():
    job = Scenario("2").running().rank_killed(0).transition(1, NodeUnreachable)
    job.transition(1, NodeUnresponsive, generation=2, detail="not taken")
    assert job.incarnations == {0: 1, 1: 2}
    job.ready(1).transition(1, NodeRemoved, incarnation=1, certain=False).wait(89)
    assert job.generation == 2
    job.wait(1)
    assert job.generation == 3
    assert "nothing proved that incarnation 1 of node 1 has ended" in job.state.incidents[-1].waited_for


@pytest.mark.parametrize("how", ["backend", "agent"])
def test_what_is_known_to_be_gone_delays_nothing(how: str):
    job = Scenario("2").running()
    if how == "backend":
        job.lost(1)
    else:
        job.ended_from_outside(1).wait(6)
    assert job.incarnations == {0: 1, 1: 2}
    assert job.ready(1).generation == 2


def test_a_node_that_was_in_no_world_delays_nothing():
    job = Scenario("2").ready(0).take(RelaunchRequested(rank=0))
    assert job.ready(0, 1).generation == 1


def test_a_node_without_a_place_in_the_world_whose_command_ends_is_replaced_once_it_has_ended():
    """Its report may be late, and its agent may have started the command again for a world that is over by now."""
    roles = {"worker": {"nodes": {"min": 2, "max": 4, "unit": 2}, "command": ["torchrun", "train.py"]}}
    job = CheckedScenario("2:4", roles=roles)
    job.running().lost(3).steps()
    assert job.group_ranks.keys() == {0, 1}
    job.command_exited(2).ready(2, 3).wait(20)
    assert job.generation == 2
    job.removed(2)
    assert job.group_ranks.keys() == {0, 1, 2, 3}


def test_one_relaunched_twice_still_waits_for_the_first():
    job = Scenario("2").running().take(RelaunchRequested(rank=0)).ready(0).take(RelaunchRequested(rank=0)).ready(0)
    assert job.incarnations == {0: 3, 1: 1}
    assert job.removed(0).generation == 1
    assert job.transition(0, NodeRemoved, incarnation=1).generation == 2


def test_nodes_of_a_resumed_job_wait_for_those_that_the_suspension_ended():
    job = Scenario("1").running().take(SuspendRequested()).take(ResumeRequested()).ready(0)
    assert job.state.world is None
    assert job.removed(0).generation == 2


def test_nodes_of_a_job_that_grows_again_wait_for_those_that_it_shrank_by():
    job = Scenario("1:2").running().take(ScaleRequested(minimum=1, maximum=1))
    job.take(ScaleRequested(minimum=1, maximum=2)).ready(1)
    assert (job.generation, job.incarnations[1]) == (1, 2)
    assert job.removed(1).generation == 2


def test_a_node_that_left_its_world_before_its_agent_answered_is_waited_for():
    job = Scenario("1:2").ready(0, 1).take(ScaleRequested(minimum=1, maximum=1))
    job.take(ScaleRequested(minimum=1, maximum=2)).ready(1)
    assert (job.generation, job.incarnations[1]) == (1, 2)
    assert job.removed(1).generation == 2


def test_a_job_at_rest_has_no_timer_for_it():
    job = Scenario("1").running().take(RelaunchRequested(rank=0)).ready(0).removed(0).steps()
    assert next_deadline(job.whole, job.job, job.now) is None
