"""Golden tables of a job's reaction to a node whose command does not enter its world."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.contract import FailureClass, JobPhase, RestartCommands
from perdure.contract.transitions import NodeJoined
from perdure.workflows.policy.repair import memory
from tests.policy.scenario import Scenario


def restarted(job: Scenario) -> set[int]:
    """Nodes whose command is started again for the current world."""
    assert job.state.world is not None
    return {rank for rank, member in job.state.world.members.items() if member.restart_command}


def test_the_first_time_its_command_is_started_again():
    job = Scenario("2").ready(0, 1).steps(0).misses_its_world(1)
    assert job.generation == 2
    assert job.incarnations == {0: 1, 1: 1}
    assert restarted(job) == {1}
    assert job.incident.failure is FailureClass.RENDEZVOUS_TIMEOUT
    assert job.incident.culprit == 1
    assert job.incident.rule.startswith("rendezvous-timeout/1")
    assert "did not enter" in job.incident.title
    assert len(job.state.restarts) == 1


@pytest.mark.parametrize(
    ("nodes", "spec", "generation", "incarnations", "phase", "rule"),
    [
        ("2", {}, 2, {0: 1, 1: 2}, JobPhase.WAITING, "node-loss/1"),
        ("1:2", {}, 3, {0: 1, 1: 2}, JobPhase.RECOVERING, "node-loss/2"),
        ("1:2", {"recovery": {"on_capacity_loss": "wait"}}, 2, {0: 1, 1: 2}, JobPhase.WAITING, "node-loss/1"),
        ("1:2", {"recovery": {"on_capacity_loss": "fail"}}, 2, {0: 1, 1: 1}, JobPhase.STOPPING, "node-loss/4"),
    ],
    ids=["fixed", "shrink", "wait", "fail"],
)
def test_the_second_time_in_a_row_the_node_is_replaced(
    nodes: str, spec: dict[str, Any], generation: int, incarnations: dict[int, int], phase: JobPhase, rule: str
):
    job = Scenario(nodes, **spec).ready(0, 1).steps(0).misses_its_world(1).steps(0).misses_its_world(1)
    assert job.generation == generation
    assert job.incarnations == incarnations
    assert job.state.phase is phase
    assert job.incident.rule.startswith(rule)
    assert "node 1 did not enter two worlds in a row" in job.incident.title
    assert "its command was started again" in job.incident.considered[0].why_not
    assert len(job.state.incidents) == 1


def test_its_replacement_is_waited_for_until_it_is_ready():
    job = Scenario("2").ready(0, 1).steps(0).misses_its_world(1).steps(0).misses_its_world(1)
    job.transition(1, NodeJoined, address="10.0.0.1")
    assert job.generation == 2
    job.removed(1).ready(1)
    assert job.generation == 3
    assert not restarted(job)
    assert job.steps().state.phase is JobPhase.RUNNING
    assert job.incident.stepping_at == job.now


def test_stepping_in_between_begins_the_count_again():
    job = Scenario("2").ready(0, 1).misses_its_world(1).steps().rank_killed(0).misses_its_world(1)
    assert job.incarnations == {0: 1, 1: 1}
    assert restarted(job) == {1}


def test_a_restart_of_the_command_is_asked_for_once():
    job = Scenario("2").ready(0, 1).misses_its_world(1).rank_killed(0)
    assert job.generation == 3
    assert not restarted(job)


def test_all_that_missed_are_started_again_whichever_node_reports_it():
    job = Scenario("3").ready(0, 1, 2).lost(0).misses_its_world(1).misses_its_world(2)
    assert job.incident.culprit == 0
    assert job.incident.failure is FailureClass.NODE_LOST
    assert job.ready(0).generation == 2
    assert restarted(job) == {1, 2}


@pytest.mark.parametrize("generation", [0, 1])
def test_a_late_word_about_a_world_that_is_over_changes_nothing(generation: int):
    job = Scenario("2").running().rank_killed(0).steps().misses_its_world(1, generation=generation)
    assert job.generation == 2
    assert job.state.phase is JobPhase.RUNNING


def test_once_it_steps_it_is_a_node_as_any_other():
    job = Scenario("2").ready(0, 1).misses_its_world(1).steps()
    assert memory.times(job.state, RestartCommands, job.node(1)) == 0
    assert job.state.phase is JobPhase.RUNNING
