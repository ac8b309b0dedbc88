"""Golden tables of how far a failure in one role reaches."""

from __future__ import annotations

import pytest

from perdure.contract import JobPhase
from perdure.contract.transitions import NodeRemoved
from perdure.workflows.policy.facts.events import ForRole, RestartRequested, ScaleRequested
from perdure.workflows.policy.record.projections import role_statuses
from perdure.workflows.policy.roles.addresses import addresses_by_role
from tests.policy.job_of_roles import Roles


def generations(job: Roles) -> list[int]:
    return [role.generation for role in job.state.roles.values()]


def test_the_processes_of_a_service_continue_when_another_one_fails():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}}).runs("ps", "trainer").rank_killed("ps", 0)
    assert generations(job) == [1, 2]
    world = job.view("ps").world
    assert world is not None
    assert world.keeps_processes
    job.runs("ps").take(ForRole("ps", ScaleRequested(minimum=3, maximum=3))).ready("ps", 2)
    world = job.view("ps").world
    assert world is not None
    assert (world.nodes, world.keeps_processes) == (3, True)
    job.runs("ps").take(ForRole("ps", RestartRequested()))
    world = job.view("ps").world
    assert world is not None
    assert not world.keeps_processes, "a user wants them restarted"
    assert generations(job) == [1, 4]


@pytest.mark.parametrize(
    ("relation", "expected"),
    [({}, [1, 2, 1]), ({"restart_with": ["a"]}, [2, 2, 1]), ({"on_failure": "job"}, [2, 2, 2])],
)
def test_other_roles_restart_for_a_failure_only_where_that_is_declared(
    relation: dict[str, object], expected: list[int]
):
    job = Roles(a={}, b=relation, c={"ready": {"port": 6000}}).runs("a", "b", "c").rank_killed("b", 0)
    assert generations(job) == expected
    job.runs("a", "b", "c").wait(3600)
    assert generations(job) == expected, "they restart once"
    assert job.state.open_incident is None
    world = job.view("c").world
    assert world is not None
    assert world.keeps_processes == (expected[2] == 1)


def test_roles_that_restart_with_each_other_do_so_once():
    job = Roles(a={"restart_with": ["b"]}, b={"restart_with": ["a"]}).runs("a", "b").lost("a", 0)
    assert generations(job) == [1, 2], "a waits for its node"
    assert job.state.incidents[1].title == "starts again with role a"
    job.runs("b", "a").wait(60)
    assert generations(job) == [2, 2]
    job.rank_killed("b", 1).runs("a", "b").wait(60)
    assert generations(job) == [3, 3]
    assert [len(role.restarts) for role in job.state.roles.values()] == [1, 1], "what a restart brings along is free"


def test_a_role_restarts_with_one_whose_world_grows():
    job = Roles(a={"restart_with": ["b"], "nodes": "2:3"}, b={}).ready("a", 0, 1).wait(60).steps("a").runs("b")
    assert generations(job) == [1, 1]
    job.ready("a", 2).runs("a", "b").wait(60)
    assert generations(job) == [2, 2]


def test_a_coordinator_restarts_when_its_workers_are_scaled_and_not_when_one_dies():
    job = Roles(chief={"nodes": 1}, worker={"ready": {"port": 6000}, "restart_on_scale": ["chief"]})
    job.runs("chief", "worker").rank_killed("worker", 0).runs("worker").wait(60)
    assert generations(job) == [1, 2]
    job.take(ForRole("worker", ScaleRequested(minimum=3, maximum=3)))
    assert len(addresses_by_role(job.state, job.job)["worker"].serves) == 3, "known before the node is there"
    job.ready("worker", 2).steps("worker").steps("chief")
    assert generations(job) == [2, 3]
    job.take(ForRole("worker", ScaleRequested(minimum=2, maximum=2)))
    job.transition("worker", 2, NodeRemoved)
    job.steps("worker").steps("chief").wait(60)
    assert generations(job) == [3, 4]
    assert job.state.open_incident is None
    assert addresses_by_role(job.state, job.job)["worker"].serves == ("127.0.0.1:6000", "127.0.0.1:6001")


def test_a_role_restarts_once_with_one_that_loses_a_node_for_good():
    service = {"ready": {"port": 6000}, "nodes": "1:2", "restart_with": ["chief"], "restart_on_scale": ["chief"]}
    job = Roles(chief={"nodes": 1}, worker=service).runs("chief", "worker").lost("worker", 1)
    assert generations(job) == [2, 2]
    job.steps("worker").steps("chief").wait(600)
    assert generations(job) == [2, 2]


def test_a_failure_that_cannot_be_repaired_stops_the_job_with_the_name_of_the_role():
    job = Roles(max_restarts=0, trainer={}, evaluator={}).runs("trainer", "evaluator").rank_killed("evaluator", 0)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.FAILED
    assert job.state.outcome.reason.startswith("role evaluator: ")
    assert job.state.decisive.role == "evaluator"


def test_a_job_continues_without_a_role_whose_failures_are_ignored():
    job = Roles(max_restarts=0, trainer={}, evaluator={"on_failure": "ignore"}).runs("trainer", "evaluator")
    job.rank_killed("evaluator", 0)
    assert job.state.outcome is None
    evaluator = job.state.roles["evaluator"]
    assert (evaluator.phase, evaluator.is_idle) == (JobPhase.FAILED, True)
    assert job.state.phase is JobPhase.RUNNING
    assert job.state.open_incident is None
    assert job.state.incidents[-1].action == "give up the role evaluator, and continue"
    assert generations(job)[0] == 1
    job.wait(3600)
    assert job.state.roles["evaluator"].is_idle, "it is not started again"
    job.command_ended("trainer")
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED
    shown = role_statuses(job.state, job.job, job.now, closed=JobPhase.SUCCEEDED)
    assert {one.name: one.phase for one in shown} == {"trainer": JobPhase.SUCCEEDED, "evaluator": JobPhase.FAILED}
