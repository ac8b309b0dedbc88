"""Tests of commands that start several torchruns, and work before, between and after them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import FailureClass, JobPhase, NodePhase
from perdure.contract.transitions import NodeJoined, NodeRemoved, NodeUnreachable
from perdure.workflows.policy.facts.events import RelaunchRequested, RestartRequested, ResumeRequested, SuspendRequested
from perdure.workflows.policy.record.projections import next_action, node_views
from perdure.workflows.policy.world.group_desire import desires_of
from perdure.workflows.policy.world.stages import has_recovered
from tests.policy.checked import CheckedScenario
from tests.policy.scenario import Scenario

A_LONG_TIME = timedelta(hours=20)


def trained(nodes: str = "2", **spec: Any) -> CheckedScenario:
    """A job whose first torchrun has finished on all nodes."""
    job = CheckedScenario(nodes, **spec)
    job.running()
    job.torchrun_finished(*job.state.world.members)  # type: ignore[union-attr]
    return job


def second_stage(job: Scenario) -> Scenario:
    assert job.state.world is not None
    return job.ready(*job.state.world.members, after=job.generation, stage=1).steps()


def test_a_finished_world_lets_torchruns_leave_and_the_job_goes_on_until_the_commands_have_ended() -> None:
    job = trained()
    desire = desires_of(job.state)[0]
    assert (desire.complete_generation, desire.stages_complete, desire.wind_down) == (1, 1, False)
    assert job.state.phase is JobPhase.RUNNING
    assert job.state.reason == "torchrun 1 has finished; commands: 2 at work"
    assert "for the command of 2 nodes to end" in next_action(job.state, job.job)
    job.wait(A_LONG_TIME)
    assert job.state.outcome is None
    job.command_ended(0)
    assert job.state.outcome is None
    assert job.state.reason == "torchrun 1 has finished; commands: 1 at work, 1 ended with 0"
    assert "for the command of node 1 to end" in next_action(job.state, job.job)
    job.command_ended(1)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED
    assert job.state.outcome.reason == "all 2 ranks finished in generation 1"
    assert job.state.incidents == ()


def test_a_second_torchrun_is_the_next_world_of_the_job_and_no_incident() -> None:
    job = trained()
    job.ready(0, after=1, stage=1)
    assert job.generation == 1
    assert job.state.reason == "torchrun 1 has finished; commands: 1 at work, 1 ready for torchrun 2"
    job.wait(A_LONG_TIME)
    assert job.generation == 1
    job.ready(1, after=1, stage=1)
    assert job.generation == 2
    assert job.state.world is not None
    assert job.state.world.stage == 1
    assert job.state.phase is JobPhase.RENDEZVOUS
    job.steps()
    assert job.state.phase is JobPhase.RUNNING
    assert (job.state.restarts, job.state.incidents) == ((), ())
    job.torchrun_finished(0, 1).command_ended(0, 1)
    assert job.state.outcome is not None
    assert job.state.outcome.reason == "the command ended with 0 on every node; 2 torchruns finished"


def test_a_rank_that_dies_in_the_second_stage_is_restarted_in_it() -> None:
    job = second_stage(trained())
    job.rank_killed(1)
    assert job.state.world is not None
    assert (job.generation, job.state.world.stage) == (3, 1)
    assert len(job.state.restarts) == 1


def test_a_replacement_in_the_second_stage_takes_part_when_it_has_passed_over_the_first() -> None:
    job = second_stage(trained())
    job.lost(1)
    assert job.incarnations == {0: 1, 1: 2}
    job.transition(1, NodeJoined, address="10.0.0.1", host="other")
    job.ready(1, stage=0)
    assert job.generation == 2
    job.ready(1, stage=1)
    assert job.state.world is not None
    assert (job.generation, job.state.world.stage) == (3, 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_command_that_fails_after_its_torchrun_is_started_again_alone_and_within_the_budget(stage: int) -> None:
    job = trained()
    limit = job.job.retry.no_progress_limit
    for attempt in range(1, limit + 1):
        job.command_exited(1, exit_code=7, message="the command exited with 7")
        assert job.state.outcome is None
        wanted = desires_of(job.state)[0].nodes
        assert {rank: node.command_restarts for rank, node in wanted.items()} == {0: 0, 1: attempt}
        assert (job.generation, job.incarnations) == (1, {0: 1, 1: 1})
        assert job.state.phase is JobPhase.RECOVERING
        incident = job.state.incidents[-1]
        assert (incident.failure, incident.culprit) == (FailureClass.USER_CODE, 1)
        assert incident.action.startswith("start the command again on its node")
        assert not has_recovered(job.state)
        job.ready(1, stage=stage)
        assert has_recovered(job.state)
        assert job.state.phase is JobPhase.RUNNING
        assert len(job.state.restarts) == attempt
    job.command_exited(1, exit_code=7, message="the command exited with 7")
    assert job.state.outcome is not None
    assert (job.state.outcome.phase, job.state.outcome.exit_code) == (JobPhase.FAILED, 1)
    assert "the command exited with 7" in job.state.outcome.reason


def test_a_command_that_ends_badly_while_others_still_train_is_started_again_when_they_have_finished() -> None:
    job = CheckedScenario("2")
    job.running()
    job.torchrun_finished(0)
    job.command_exited(0, exit_code=None, signal=9)
    assert job.state.interruption is None
    job.torchrun_finished(1)
    assert desires_of(job.state)[0].nodes[0].command_restarts == 1
    assert job.state.outcome is None
    job.command_ended(1)
    assert job.state.outcome is None
    job.ready(0, stage=0).command_ended(0)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_node_lost_while_its_command_works_is_replaced_and_the_others_are_not_disturbed() -> None:
    job = trained()
    job.command_ended(0).lost(1)
    assert job.incarnations == {0: 1, 1: 2}
    assert job.state.incidents[-1].failure is FailureClass.NODE_LOST
    assert job.state.world is not None
    assert job.state.world.generation == 1
    job.transition(1, NodeJoined, address="10.0.0.1", host="other").ready(1, stage=0)
    assert job.state.outcome is None
    assert has_recovered(job.state)
    job.wait(A_LONG_TIME)
    job.command_ended(1, generation=0)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_node_whose_command_has_ended_is_not_missed() -> None:
    job = trained()
    job.command_ended(0).lost(0)
    assert job.incarnations == {1: 1}
    assert job.state.incidents == ()
    job.command_ended(1)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_node_lost_in_the_exit_barrier_is_replaced_once_the_others_have_finished() -> None:
    job = CheckedScenario("2")
    job.running()
    job.torchrun_finished(0).lost(0)
    assert job.incarnations == {1: 1}
    assert job.state.interruption is None
    job.torchrun_finished(1)
    assert job.incarnations == {0: 2, 1: 1}
    job.command_ended(1)
    assert job.state.outcome is None


def test_where_too_few_commands_ask_for_another_torchrun_the_job_stops_with_the_reason() -> None:
    job = trained()
    job.command_ended(0).ready(1, after=1, stage=1)
    assert job.state.outcome is not None
    assert (job.state.outcome.phase, job.state.outcome.exit_code) == (JobPhase.FAILED, 1)
    assert "node 0 has ended with 0, and 1 other asks for torchrun 2" in job.state.outcome.reason


def test_where_enough_commands_ask_for_another_torchrun_the_job_goes_on_without_the_others() -> None:
    job = trained("1:3")
    job.ready(0, 1, after=1, stage=1)
    assert job.generation == 1
    job.command_ended(2)
    assert job.generation == 2
    assert set(job.group_ranks) == {0, 1}
    job.steps().lost(2)
    assert 2 not in job.incarnations
    job.torchrun_finished(0, 1).command_ended(0, 1)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_job_does_not_wait_for_a_command_that_ended_before_a_world_of_a_later_stage_broke() -> None:
    job = trained("1:3")
    job.command_ended(0)
    job.ready(1, 2, after=1, stage=1).steps()
    job.rank_killed(1).steps()
    assert job.generation == 3
    job.command_ended(1, 2)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_relaunch_of_a_node_whose_command_has_ended_between_two_worlds_makes_no_successor() -> None:
    job = trained("3").take(RelaunchRequested(rank=1)).command_ended(1)
    job.take(RelaunchRequested(rank=1)).wait(A_LONG_TIME)
    assert job.incarnations == {0: 1, 2: 1}
    job.command_ended(0, 2)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_an_elastic_node_that_came_too_late_does_its_own_work_before_the_job_ends() -> None:
    job = CheckedScenario("1:2")
    job.ready(0, stage=0).wait(10)
    job.steps(0)
    job.transition(1, NodeJoined, address="10.0.0.1", host="host-1")
    job.torchrun_finished(0).command_ended(0)
    assert job.state.outcome is None or not job.state.nodes[1].requested_world
    job.ready(1, stage=0).command_ended(1, generation=0)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_an_unreachable_node_may_work_and_is_given_up_on_when_nothing_else_is_waited_for() -> None:
    job = trained()
    job.transition(1, NodeUnreachable, detail="its agent stopped renewing its lease")
    job.wait(A_LONG_TIME)
    assert job.incarnations == {0: 1, 1: 1}
    job.command_ended(0)
    job.wait(job.job.recovery.replace_timeout - timedelta(seconds=1))
    assert job.incarnations == {0: 1, 1: 1}
    job.wait(2)
    assert job.incarnations == {0: 1, 1: 2}
    assert job.state.incidents[-1].failure is FailureClass.NODE_UNRESPONSIVE


def test_commands_that_start_no_torchrun_and_end_with_0_are_a_job_that_has_succeeded() -> None:
    job = CheckedScenario("2")
    for rank in (0, 1):
        job.transition(rank, NodeJoined, address=f"10.0.0.{rank}", host="here")
        assert job.state.outcome is None
        job.command_ended(rank, generation=0)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED
    assert job.state.outcome.reason == "the command ended with 0 on every node; it started no torchrun"


def test_a_command_that_starts_no_torchrun_beside_one_that_does_stops_the_job() -> None:
    job = CheckedScenario("2")
    job.transition(0, NodeJoined, address="10.0.0.0", host="here").command_ended(0, generation=0)
    job.ready(1, stage=0)
    assert job.state.outcome is not None
    assert "fewer than nodes.min = 2" in job.state.outcome.reason


def test_a_job_succeeds_when_the_commands_of_all_nodes_end_with_their_ranks() -> None:
    job = CheckedScenario("2")
    job.running()
    job.finish(0, 1)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


def test_a_suspended_job_goes_on_with_the_stage_that_it_was_in() -> None:
    job = second_stage(trained())
    job.take(SuspendRequested())
    job.take(ResumeRequested())
    for rank in (0, 1):
        job.transition(rank, NodeRemoved, incarnation=1)
    for rank in (0, 1):
        job.transition(rank, NodeJoined, address=f"10.0.0.{rank}", host="here").ready(rank, stage=0)
    assert job.state.world is None
    job.ready(0, 1, stage=1)
    assert job.state.world is not None
    assert job.state.world.stage == 1


def test_a_command_that_had_ended_when_its_job_was_suspended_does_not_start_again() -> None:
    job = trained().command_ended(0)
    job.take(SuspendRequested())
    job.transition(0, NodeRemoved).transition(1, NodeRemoved)
    job.take(ResumeRequested())
    assert job.node(0).phase is NodePhase.REMOVED
    assert job.node(1).incarnation == 2


def test_a_restart_asked_between_two_worlds_changes_nothing() -> None:
    job = trained()
    job.take(RestartRequested())
    assert job.state.interruption is None
    assert (job.generation, job.state.phase) == (1, JobPhase.RUNNING)
    assert all(node.phase is NodePhase.JOINED for node in job.state.nodes.values())


def test_a_line_that_fails_on_every_node_is_one_try_of_the_job() -> None:
    """An upload that fails everywhere once must not use up what is allowed to one node."""
    nodes = range(8)
    job = trained("8")
    limit = job.job.retry.no_progress_limit
    for attempt in range(1, limit + 1):
        for rank in nodes:
            job.command_exited(rank, exit_code=7, message="the command exited with 7")
            assert job.state.outcome is None
            job.ready(rank, stage=0)
        wanted = desires_of(job.state)[0].nodes
        assert {node.command_restarts for node in wanted.values()} == {attempt}
        assert len(job.state.restarts) == attempt
    job.command_exited(3, exit_code=7, message="the command exited with 7")
    assert job.state.outcome is not None
    assert (job.state.outcome.phase, job.state.outcome.exit_code) == (JobPhase.FAILED, 1)


def test_commands_that_fail_while_others_train_are_one_try_of_the_job() -> None:
    job = CheckedScenario("3")
    job.running()
    for rank in (0, 1):
        job.torchrun_finished(rank).command_exited(rank, exit_code=7, message="the command exited with 7")
    job.torchrun_finished(2)
    job.command_exited(2, exit_code=7, message="the command exited with 7")
    assert [node.command_restarts for node in desires_of(job.state)[0].nodes.values()] == [1, 1, 1]
    assert len(job.state.restarts) == 1


def test_nodes_between_two_torchruns_say_what_their_commands_do() -> None:
    job = trained().command_ended(0)
    assert [view.reason for view in node_views(job.state)] == [
        "its command has ended with 0",
        "its command works without ranks",
    ]
    job.command_exited(1, exit_code=7, message="the command exited with 7")
    assert node_views(job.state)[1].reason == "its command starts over"
