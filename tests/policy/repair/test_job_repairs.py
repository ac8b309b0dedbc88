"""Golden tables of a job's repairs: the culprit, and the smallest repair that works."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import FailureClass, JobPhase, LossCause, Restore, RestoreSource
from perdure.contract.transitions import (
    AnyTransition,
    NodeCommanded,
    NodeCreateFailed,
    NodeLost,
    NodePending,
    NodeReachable,
    NodeReady,
    NodeRestoredCheckpoint,
    NodeUnreachable,
    NodeUnresponsive,
)
from perdure.workflows.policy.behavior import Behavior
from tests.policy.scenario import Scenario, counted, reported


def test_a_killed_rank_is_restarted_in_place_at_once():
    job = Scenario("2").running().rank_killed(1)
    assert job.generation == 2
    assert job.incarnations == {0: 1, 1: 1}
    incident = job.state.incidents[-1]
    assert incident.failure is FailureClass.KILLED
    assert incident.culprit == 1
    assert incident.rule.startswith("rank-failure/1")
    job.wait(2).steps()
    assert job.state.phase is JobPhase.RUNNING
    assert job.state.incidents[-1].stepping_at == job.now


def test_a_victim_does_not_decide_while_the_culprit_may_speak():
    job = Scenario("3").running().peer_failed(0).peer_failed(1)
    assert job.generation == 1
    job.rank_killed(2, signal=11)
    assert job.generation == 2
    assert job.state.incidents[-1].culprit == 2
    assert job.state.incidents[-1].failure is FailureClass.CRASH


def test_an_exit_without_an_error_text_may_be_a_victim():
    job = Scenario("2").running().rank_raised(0, error=None)
    assert job.generation == 1
    job.lost(1)
    assert job.state.incidents[-1].culprit == 1
    assert job.state.incidents[-1].failure is FailureClass.NODE_LOST


def test_machines_of_a_large_job_that_go_one_after_the_other_cost_it_one_restart():
    job = Scenario("100:120").running().lost(1).wait(0.1).lost(2)
    assert job.generation == 1
    job.wait(0.11)
    assert (job.generation, job.state.world.nodes if job.state.world else 0) == (2, 118)
    assert len(job.state.restarts) == 1


def test_victims_alone_restart_in_place_after_the_grace():
    job = Scenario("3").running().peer_failed(0).wait(0.9)
    assert job.generation == 1
    job.wait(0.2)
    assert job.generation == 2
    assert job.state.incidents[-1].failure is FailureClass.PEER_LOST


def test_victims_everywhere_need_no_grace():
    assert Scenario("2").running().peer_failed(0).peer_failed(1).generation == 2


def test_late_reports_of_a_generation_that_is_over_change_nothing():
    job = Scenario("2").running().rank_killed(1).peer_failed(0, generation=1)
    assert job.generation == 2
    assert len(job.state.restarts) == 1
    assert len(job.state.incidents[-1].evidence) == 2


def test_the_same_message_twice_counts_once():
    job = Scenario("2").running()
    failure = job.failure(1, kind="RANKS", sequence=7, message="gone")
    job.rank_killed(1, sequence=7).steps().rank_killed(1, sequence=7)
    assert job.generation == 2
    assert failure.sequence == 7


@pytest.mark.parametrize("after", [-1.0, 1.0], ids=["ended before the decision", "ended after it"])
def test_a_command_that_its_agent_starts_again_for_the_newer_world_ends_no_world(after: float):
    job = Scenario("2").running().command_exited(0, signal=9, exit_code=None)
    assert job.generation == 2
    time = job.now + timedelta(seconds=after)
    job.wait(2).command_exited(1, signal=9, exit_code=None, generation=1, time=time, starts_again=True)
    assert job.generation == 2
    assert {evidence.rank for evidence in job.state.incidents[-1].evidence} == {0, 1}
    assert job.steps().state.phase is JobPhase.RUNNING


def test_an_older_incarnation_is_not_heard():
    job = Scenario("1:2").running()
    old = job.identity(1)
    job.lost(1).steps()
    generation = job.generation

    job.take(job.failure(0).model_copy(update={"sender": old}))
    assert job.generation == generation


def test_a_wrong_token_is_not_heard():

    job = Scenario("2").running()
    forged = job.failure(1).model_copy(update={"sender": job.identity(1).model_copy(update={"token": "guess"})})
    assert job.take(forged).generation == 1


def test_a_lost_node_of_a_fixed_job_is_replaced():
    job = Scenario("2").running().peer_failed(0).lost(1)
    assert job.incarnations == {0: 1, 1: 2}
    assert job.generation == 1
    assert job.state.phase is JobPhase.WAITING
    job.wait(2).ready(1)
    assert job.generation == 2
    assert job.group_ranks == {0: 0, 1: 1}
    assert len(job.state.restarts) == 1
    assert job.steps().state.phase is JobPhase.RUNNING


def test_a_node_that_is_ended_from_outside_is_replaced_once_its_backend_had_time_to_say_why():
    spec = {"retry": {"fatal_exit_codes": [1]}}
    job = Scenario("2", **spec).running().ended_from_outside(1, exit_code=1).peer_failed(0)
    assert job.incarnations == {0: 1, 1: 1}
    job.wait(2).lost(1, "evicted, as a drain of its machine does")
    assert job.incarnations == {0: 1, 1: 2}
    assert any("drain" in sign.text for sign in job.state.incidents[-1].evidence)

    job = Scenario("2", **spec).running().ended_from_outside(1, exit_code=1).peer_failed(0).wait(6.1)
    assert job.incarnations == {0: 1, 1: 2}
    assert job.state.incidents[-1].failure is FailureClass.DISRUPTED


def test_nodes_that_are_lost_together_are_one_incident_and_one_restart():
    job = Scenario("2:4").running().lost_together(2, 3)
    assert job.group_ranks == {0: 0, 1: 1}
    assert (job.generation, len(job.state.incidents), len(job.state.restarts)) == (2, 1, 1)


def test_a_lost_node_of_an_elastic_job_is_gone_on_without():
    job = Scenario("1:3").running().lost(0)
    assert job.generation == 2
    assert job.group_ranks == {1: 1, 2: 0}, "survivors keep the ranks that still exist"
    assert job.incarnations[0] == 2
    assert "3 to 2 nodes" in job.state.incidents[-1].title
    job.steps().wait(3).ready(0)
    assert job.generation == 3
    assert job.group_ranks == {0: 2, 1: 1, 2: 0}


def test_on_capacity_loss_wait_waits_and_then_goes_on_with_what_it_has():
    job = Scenario("1:2", recovery={"on_capacity_loss": "wait", "replace_timeout": "60s"}).running().lost(1)
    assert job.generation == 1
    job.wait(59)
    assert job.generation == 1
    job.wait(1)
    assert job.group_ranks == {0: 0}


def test_on_capacity_loss_fail_stops():
    job = Scenario("1:2", recovery={"on_capacity_loss": "fail"}).running().lost(1)
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 3


def test_min_not_reached_stops_with_the_reason():
    job = Scenario("2").ready(0).transition(1, NodePending, detail="no free slot").wait(timedelta(minutes=10))
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 3
    assert "no free slot" in job.state.outcome.reason
    assert "nodes.min is 2" in job.state.outcome.reason


def test_unreachable_is_not_failed():
    job = Scenario("2").running().transition(1, NodeUnreachable).wait(timedelta(hours=3))
    assert job.generation == 1
    assert job.incarnations == {0: 1, 1: 1}
    assert not job.state.incidents
    job.transition(1, NodeReachable)
    assert job.state.phase is JobPhase.RUNNING


def test_unreachable_and_its_peers_failed_is_replaced():
    job = Scenario("1:2").running().transition(1, NodeUnreachable, detail="lease lapsed").peer_failed(0).wait(6.5)
    assert job.group_ranks == {0: 0}
    assert job.incarnations[1] == 2
    assert job.state.incidents[-1].failure is FailureClass.NODE_UNRESPONSIVE


def test_a_node_that_does_not_take_the_next_world_is_replaced():
    job = Scenario("1:2").running().peer_failed(0).wait(1.5)
    assert job.generation == 2
    job.wait(4).transition(1, NodeUnresponsive, generation=2, detail="not taken within 4 s")
    assert job.generation == 3
    assert job.group_ranks == {0: 0}
    assert len(job.state.incidents) == 1, "one story: what the peers reported first is its effect"


def test_after_an_outage_unresponsive_agents_are_given_time():
    job = Scenario("1:2").running()
    job.wait(40).rank_killed(0, time=job.now - timedelta(seconds=40))
    assert job.generation == 2
    job.wait(4).transition(1, NodeUnresponsive, generation=2)
    assert job.generation == 2
    job.transition(1, NodeCommanded, generation=2).steps()
    assert job.incarnations == {0: 1, 1: 1}


def test_a_rank_that_took_long_to_end_shows_no_outage():
    job = Scenario("1:2").running().wait(40)
    job.rank_killed(0, time=job.now - timedelta(seconds=40), reported_at=job.now)
    job.wait(4).transition(1, NodeUnresponsive, generation=2)
    assert (job.generation, job.group_ranks) == (3, {0: 0})


def test_unresponsive_while_the_world_steps_means_nothing():
    job = Scenario("2").running().transition(1, NodeUnresponsive, generation=1)
    assert job.generation == 1
    assert job.incarnations == {0: 1, 1: 1}


def test_a_command_that_is_not_found_stops_at_once():
    job = Scenario("2").command_exited(0, 127, generation=0, message="no such command: trochrun")
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 1
    assert job.state.outcome.reason == "no such command: trochrun"


def test_a_fatal_exit_code_stops_at_once():
    job = Scenario("2").running().rank_raised(0, exit_code=2)
    assert job.state.outcome is not None
    assert "retry.fatal_exit_codes" in job.state.outcome.reason


def test_a_script_that_fails_at_once_every_time_stops_after_n_restarts():
    job = Scenario("2").ready(0, 1)
    for _ in range(3):
        job.rank_raised(0)
        assert job.state.outcome is None
    job.rank_raised(0)
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 1
    assert "no progress over 3 restarts" in job.state.outcome.reason


def test_the_failure_that_gained_the_steps_is_none_of_those_without_progress():
    job = Scenario("2").ready(0, 1)
    for _ in range(4):
        job.rank_raised(0, progress=counted(5))
        assert job.state.outcome is None
    job.rank_raised(0, progress=counted(5))
    assert job.state.outcome is not None
    assert "no progress over 3 restarts" in job.state.outcome.reason


def test_a_killed_rank_neither_counts_as_a_failure_without_progress_nor_begins_the_count_anew():
    job = Scenario("2").ready(0, 1)
    for _ in range(3):
        job.rank_raised(0).rank_killed(1)
        assert job.state.outcome is None
    job.rank_raised(0)
    assert job.state.outcome is not None
    assert "no progress over 3 restarts" in job.state.outcome.reason


def test_reported_progress_resets_the_count_and_repetition_does_not():
    job = Scenario("2", retry={"max_restarts": 100}).ready(0, 1)
    for step in range(1, 20):
        job.rank_raised(0, progress=reported(step))
    assert job.state.outcome is None
    for _ in range(4):
        job.rank_raised(0, progress=reported(19))
    assert job.state.outcome is not None


def test_counted_steps_that_do_not_grow_are_no_progress():
    job = Scenario("2", retry={"max_restarts": 100}).ready(0, 1).rank_raised(0, progress=counted(1000))
    for _ in range(3):
        job.rank_raised(0, progress=counted(100))
        assert job.state.outcome is None
    assert job.rank_raised(0, progress=counted(100)).state.outcome is not None


def lose_a_peer(job: Scenario, steps: int) -> None:
    """Node 0 has ended by itself, as with an early stop on rank 0 alone, and node 1 loses it."""
    job.finish(0).peer_failed(1, progress=counted(steps) if steps else None)
    job.wait(job.job.timing.rendezvous.victim_grace)


def test_ranks_that_lose_another_one_at_the_same_step_again_and_again_stop_the_job():
    job = Scenario("2", retry={"max_restarts": 100}).running()
    for _ in range(4):
        lose_a_peer(job, 61)
        assert job.state.outcome is None
        assert job.incident.title.startswith("connections between ranks broke after node 0 had finished: ")
        job.steps()
    lose_a_peer(job, 61)
    assert job.state.outcome is not None
    assert "no progress over 3 restarts" in job.state.outcome.reason


def test_ranks_that_lose_another_one_before_their_first_step_have_the_whole_budget():
    job = Scenario("2", retry={"max_restarts": 100}).running()
    for _ in range(10):
        job.finish(0).peer_failed(1, progress=counted(0)).wait(job.job.timing.rendezvous.victim_grace)
        assert job.state.outcome is None


def test_ranks_that_lose_another_one_later_each_time_go_on():
    job = Scenario("2", retry={"max_restarts": 100}).running()
    for steps in range(10, 20):
        lose_a_peer(job, steps)
        job.steps()
    assert job.state.outcome is None


def continues_from(job: Scenario, step: int) -> None:
    restored = Restore(step=step, source=RestoreSource.MEMORY)
    job.transition(0, NodeRestoredCheckpoint, generation=job.generation, restored=restored).steps()


def test_ranks_that_lose_another_one_ever_sooner_go_on_while_each_world_continues_from_a_later_step():
    job, reached = Scenario("2", retry={"max_restarts": 100}).running(), 0
    for steps in range(900, 800, -10):
        lose_a_peer(job, steps)
        assert job.state.outcome is None
        reached += steps
        continues_from(job, reached)


def test_ranks_that_lose_another_one_at_the_step_from_which_each_world_continues_stop_the_job():
    job = Scenario("2", retry={"max_restarts": 100}).running()
    lose_a_peer(job, 500)
    for _ in range(4):
        continues_from(job, 499)
        lose_a_peer(job, 1)
    assert job.state.outcome is None, "the first of these worlds continued from a later step"
    continues_from(job, 499)
    lose_a_peer(job, 1)
    assert job.state.outcome is not None
    assert "no progress over 3 restarts" in job.state.outcome.reason


def test_a_script_that_fails_by_itself_must_gain_steps_in_each_world():
    job = Scenario("2", retry={"max_restarts": 100}).running()
    for step in (499, 520, 530, 535):
        job.rank_raised(0, f"ValueError: {step}", progress=counted(1000 - step))
        assert job.state.outcome is None
        continues_from(job, step)
    job.rank_raised(0, "ValueError: the last", progress=counted(1))
    assert job.state.outcome is not None


def test_ranks_that_do_not_find_each_other_use_up_the_budget_alone():
    job = Scenario("2", retry={"max_restarts": 8}).running()
    for _ in range(8):
        lose_a_peer(job, 0)
        assert job.state.outcome is None
    lose_a_peer(job, 0)
    assert job.state.outcome is not None
    assert "retry.max_restarts" in job.state.outcome.reason


def test_a_run_that_an_older_release_began_counts_lost_peers_in_the_budget_alone():
    job = Scenario("2", retry={"max_restarts": 100})
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    job.running()
    for _ in range(10):
        lose_a_peer(job, 61)
        job.steps()
    assert job.state.outcome is None


def test_kills_from_outside_do_not_count_against_progress():
    job = Scenario("2").ready(0, 1)
    for _ in range(8):
        job.rank_killed(1)
    assert job.state.outcome is None


def test_the_restart_budget_slides():
    job = Scenario("2", retry={"max_restarts": 2, "window": "10m"}).running()
    job.rank_killed(1).wait(timedelta(minutes=9)).steps().rank_killed(1).wait(timedelta(minutes=2)).steps()
    assert job.rank_killed(1).state.outcome is None
    assert job.rank_killed(1).state.outcome is not None
    assert job.state.outcome is not None
    assert "retry.max_restarts" in job.state.outcome.reason


def test_machines_that_go_with_others_do_not_use_up_the_budget():
    job = Scenario("2:16", retry={"max_restarts": 2}).running()
    for rank in range(10):
        job.lost(rank).wait(2)
    assert job.state.outcome is None
    assert len(job.state.restarts) == 1


def test_a_node_that_is_lost_again_and_again_does():
    job = Scenario("2:16", retry={"max_restarts": 2}).running()
    for _ in range(3):
        job.lost(1).ready(1).steps().wait(31)
    assert job.state.outcome is not None
    assert "retry.max_restarts" in job.state.outcome.reason


def test_torchrun_killed_is_started_again_on_its_node():
    job = Scenario("2").running().command_exited(1, None, signal=9)
    assert job.generation == 2
    assert job.incarnations == {0: 1, 1: 1}
    assert job.state.incidents[-1].failure is FailureClass.COMMAND_LOST


def test_a_command_that_died_after_the_next_world_was_decided_breaks_that_one_too():
    job = Scenario("2").running().rank_killed(0).wait(0.1).command_exited(1, None, signal=9, generation=1)
    assert job.generation == 3


def test_a_second_loss_does_not_cost_the_first_one_its_replacement():
    job = Scenario("3").running().lost(0).wait(1).lost(2)
    assert job.incarnations == {0: 2, 1: 1, 2: 2}
    assert job.ready(0, 2).generation == 2


def test_a_node_that_is_lost_after_it_finished_is_not_missed():
    job = Scenario("2").running().finish(0).lost(0)
    assert job.generation == 1
    assert 0 not in job.incarnations
    job.finish(1)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


@pytest.mark.parametrize("first", ["the lost one", "the other's rank"])
def test_a_node_that_is_lost_after_it_finished_is_replaced_where_the_others_must_go_back(first: str):
    job = Scenario("2").running().finish(0)
    if first == "the lost one":
        job.lost(0).rank_killed(1)
        assert job.incarnations == {0: 2, 1: 1}
        job.ready(0)
    else:
        job.rank_killed(1).lost(0).ready(0)
    job.steps().finish(0, 1)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_replacement_that_never_gets_ready_is_asked_for_with_growing_pauses():
    job = Scenario("1:2").running().lost(1).steps()
    assert job.incarnations[1] == 2
    job.lost(1)
    assert job.incarnations[1] == 3
    job.lost(1)
    assert 1 not in job.incarnations
    job.wait(5)
    assert job.incarnations[1] == 4
    job.lost(1).wait(9)
    assert 1 not in job.incarnations
    assert job.wait(1).incarnations[1] == 5
    assert job.generation == 2, "the world that steps is left alone"


def test_a_refused_node_stops_the_job():
    job = Scenario("2").transition(0, NodeCreateFailed, detail="image: no such image")
    assert job.state.outcome is not None
    assert "no such image" in job.state.outcome.reason


@pytest.mark.parametrize("kind", [NodeLost, NodeReady, NodeUnresponsive, NodeCreateFailed])
def test_edges_of_older_incarnations_change_nothing(kind: type[AnyTransition]):
    job = Scenario("1:2").running().lost(1).steps().ready(1).steps()
    before = job.state
    assert job.transition(1, kind, incarnation=1, generation=0).state == before


def test_what_the_specification_cannot_have_started_stops_the_job_at_once() -> None:
    text = "its container ended with exit code 127 (Error: neither python3 nor python is on PATH in this image)"
    job = Scenario("2").transition(0, NodeCreateFailed, detail=text, cause=LossCause.JOB)
    assert job.state.outcome is not None
    assert (job.state.outcome.exit_code, job.state.restarts) == (1, ())
    assert job.state.outcome.reason == f"node 0 cannot be started: {text}"


def test_the_rank_that_finds_tensors_of_different_sizes_is_not_blamed():
    error = (
        "gloo::EnforceNotMet: [enforce fail at gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 8 vs 4"
    )
    job = Scenario("2").running().rank_raised(0, error)
    incident = job.incident
    assert (incident.failure, incident.culprit, incident.also_failed) == (FailureClass.USER_CODE, None, ())
    assert incident.title.startswith("ranks gave tensors of different sizes to one collective, as node 0 found: rank 0")
    assert (job.generation, job.incarnations) == (2, {0: 1, 1: 1})
