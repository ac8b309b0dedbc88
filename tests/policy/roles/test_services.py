"""Tests of services: roles whose nodes serve others, each by itself."""

from __future__ import annotations

from perdure.contract import Finished, JobPhase
from perdure.contract.transitions import NodeStepping
from perdure.workflows.policy.facts.events import ForRole, RestartRequested
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.roles.addresses import addresses_by_role
from tests.policy.job_of_roles import Roles


def services() -> Roles:
    return Roles(trainer={}, ps={"ready": {"port": 6000}, "nodes": 3}).runs("ps", "trainer")


def process_ends(job: Roles, rank: int) -> Roles:
    generation = job.view("ps").generation
    message = {"sequence": 100 + rank + 10 * generation, "time": job.now, "generation": generation}
    return job.take(Finished(sender=job.sender("ps", rank), command_runs=False, **message))


def members(job: Roles) -> list[int]:
    world = job.view("ps").world
    return sorted(world.members) if world is not None else []


def test_a_service_shows_how_many_of_its_nodes_serve():
    assert services().state.roles["ps"].reason == "3 of 3 nodes serve"


def test_a_service_is_not_awaited_to_make_a_step():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}})
    for role in job.state.roles:
        job.ready(role)
        for rank in range(2):
            job.transition(role, rank, NodeStepping, generation=1, counted=False, entered_at=job.now)
    assert next_action(job.view("ps"), job.job) == "nothing to do"
    assert next_action(job.view("trainer"), job.job).startswith("waits for the first step of generation 1")


def ranks(job: Roles) -> dict[int, tuple[int, int]]:
    """The ranks of the members, by slot: of the node and of its process."""
    world = job.view("ps").world
    assert world is not None
    assert (world.nodes, world.processes) == (len(world.members), len(world.members))
    return {slot: (member.group_rank, member.base_rank) for slot, member in world.members.items()}


def test_a_rank_is_the_slot_for_life_whichever_nodes_are_lost_and_return():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}, "nodes": "1:3"}).runs("ps", "trainer")
    assert ranks(job) == {0: (0, 0), 1: (1, 1), 2: (2, 2)}
    job.lost("ps", 0).wait(3600)
    assert ranks(job) == {1: (1, 1), 2: (2, 2)}, "their processes continue"
    assert [bool(address) for address in told(job)] == [False, True, True]
    job.steps("ps").ready("ps", 0).wait(3600)
    assert ranks(job) == {0: (0, 0), 1: (1, 1), 2: (2, 2)}
    assert all(told(job))


def told(job: Roles) -> tuple[str, ...]:
    return addresses_by_role(job.state, job.job)["ps"].addresses


def test_a_process_that_ended_with_0_is_not_started_again_when_another_one_fails():
    job = process_ends(services(), 0)
    assert members(job) == [0, 1, 2]
    job.rank_killed("ps", 2)
    assert (job.view("ps").generation, members(job)) == (2, [1, 2])
    assert ranks(job) == {1: (1, 1), 2: (2, 2)}
    job.steps("ps").wait(3600)
    assert (job.view("ps").generation, job.view("ps").phase) == (2, JobPhase.RUNNING)
    job.lost("ps", 1).ready("ps", 1).steps("ps").wait(3600)
    assert (job.view("ps").generation, members(job)) == (3, [1, 2])
    assert job.state.open_incident is None


def test_a_node_whose_process_ended_with_0_is_not_replaced():
    job = process_ends(services(), 0).lost("ps", 0).wait(3600)
    assert job.view("ps").nodes[0].incarnation == 1
    job.rank_killed("ps", 1).wait(3600)
    assert (job.view("ps").nodes[0].incarnation, members(job)) == (1, [1, 2])


def test_a_restart_by_a_user_leaves_what_has_ended_with_0():
    job = process_ends(services(), 0).take(ForRole("ps", RestartRequested())).steps("ps")
    assert (members(job), job.view("ps").phase) == ([1, 2], JobPhase.RUNNING)


def test_a_service_has_completed_when_each_process_has_ended_with_0():
    job = process_ends(services(), 0).rank_killed("ps", 2).steps("ps")
    assert not process_ends(job, 1).view("ps").completed
    assert process_ends(job, 2).view("ps").completed
    assert job.view("ps").phase is JobPhase.SUCCEEDED
