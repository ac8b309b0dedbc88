"""Tests of what the ladder remembers of earlier interruptions, so that rungs need no counters of their own."""

from __future__ import annotations

from perdure.contract import Action, ExtendFirstStep, FailureClass, ReplaceNodes, RestartCommands, RestartRanks
from perdure.workflows.policy.facts.events import RestartRequested
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.memory import RepairMemory
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.role import Interruption
from tests.policy.scenario import Scenario


def test_an_action_on_nodes_is_remembered_for_each_once_the_next_world_is_sent_out():
    job = Scenario("3").ready(0, 1, 2).steps(0).wait(60)
    job.misses_its_world(1)
    repair = memory.last(job.state, RestartCommands, 1)
    assert repair is not None
    assert (repair.times, repair.incarnation, repair.generation, repair.at) == (1, 1, 1, job.now)
    assert memory.times(job.state, RestartCommands, job.node(1)) == 1
    assert memory.times(job.state, RestartCommands, job.node(2)) == 0
    assert memory.times_for_role(job.state, RestartRanks) == 1


def test_a_decision_that_is_made_again_for_the_same_world_counts_once():
    job = Scenario("2").running().lost(1)
    assert job.state.interruption is not None
    assert job.state.interruption.decided
    assert memory.last(job.state, ReplaceNodes, 1) is None, "it may be decided again until the next world is sent out"
    job.rank_raised(0).ready(1)
    repair = memory.last(job.state, ReplaceNodes, 1)
    assert repair is not None
    assert repair.times == 1


def test_what_was_done_for_a_node_does_not_count_for_its_successor_and_is_known_of_its_place():
    job = Scenario("2").running()
    for _ in range(2):
        job.lost(1).removed(1).ready(1).steps()
    repair = memory.last(job.state, ReplaceNodes, 1)
    assert repair is not None
    assert (repair.times, repair.incarnation) == (1, 2)
    assert memory.times(job.state, ReplaceNodes, job.node(1)) == 0


def test_what_users_request_is_no_repair():
    job = Scenario("2").running().take(RestartRequested(reason="a try"))
    assert job.generation == 2
    assert job.state.memory == RepairMemory()


def test_a_node_that_runs_forgets_the_restart_of_its_command_and_no_other_does():
    job = Scenario("3").ready(0, 1, 2).steps(0)
    job.state = decided(job.state, RestartCommands(nodes=(1, 2)), ReplaceNodes(nodes=(1,)))
    job.state = memory.close_interruption(job.state, job.now)
    job.steps(1)
    assert memory.times(job.state, RestartCommands, job.node(1)) == 0
    assert memory.times(job.state, RestartCommands, job.node(2)) == 1
    assert memory.times(job.state, ReplaceNodes, job.node(1)) == 1


def test_an_action_is_counted_for_each_interruption_and_forgotten_everywhere_at_once():
    job = Scenario("3").running()
    for times in (1, 2):
        job.state = memory.close_interruption(decided(job.state, RestartRanks(nodes=(2,)), RestartRanks()), job.now)
        assert memory.times(job.state, RestartRanks, job.node(2)) == times
        assert memory.times_for_role(job.state, RestartRanks) == times
    assert memory.most_times(job.state, RestartRanks) == 2
    assert memory.most_times(job.state, RestartCommands) == 0
    job.state = memory.forget_all(job.state, RestartRanks)
    assert job.state.memory == RepairMemory()


def test_the_next_stage_begins_with_nothing_remembered():
    job = Scenario("1").ready(0, stage=0).steps().rank_killed(0).steps()
    assert memory.times(job.state, RestartRanks, job.node(0)) == 1
    job.torchrun_finished(0).ready(0, after=2, stage=1)
    assert job.generation == 3
    assert job.state.memory == RepairMemory()


def test_a_memory_that_is_carried_to_the_next_run_is_read_as_it_was():
    job = Scenario("2").running().rank_killed(0)
    job.state = memory.close_interruption(decided(job.state, RestartRanks(nodes=(1,)), ExtendFirstStep()), job.now)
    assert type(job.whole).model_validate_json(job.whole.model_dump_json()).view().memory == job.state.memory


def decided(state: RoleInJob, *actions: Action) -> RoleInJob:
    failure = NodeFailure(rank=1, failure=FailureClass.KILLED, time=state.started_at, text="it was killed")
    return state.replace(interruption=Interruption(since=state.started_at, failures=(failure,), actions=actions))
