"""Golden tables of how a job forms its worlds, follows users' requests, and ends."""

from __future__ import annotations

from datetime import timedelta

from perdure.contract import JobPhase, NodePhase, NodeView
from perdure.contract.transitions import NodeJoined, NodePortsChanged, NodeReachable, NodeReady, NodeUnreachable
from perdure.workflows.policy.facts.events import (
    CancelRequested,
    GroupAdopted,
    GroupWoundDown,
    RelaunchRequested,
    RestartRequested,
    ResumeRequested,
    ScaleRequested,
    SuspendRequested,
)
from perdure.workflows.policy.record.projections import result_of
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of, is_over
from tests.policy.checked import CheckedScenario
from tests.policy.scenario import Scenario


def test_a_full_world_forms_as_soon_as_the_last_node_is_ready():
    job = Scenario("3").ready(0, 2)
    assert job.state.world is None
    job.ready(1)
    assert job.group_ranks == {0: 0, 1: 1, 2: 2}
    assert job.state.phase is JobPhase.RENDEZVOUS
    assert job.steps().state.phase is JobPhase.RUNNING


def test_an_elastic_world_waits_for_the_last_call_only():
    job = Scenario("2:4").ready(0, 1).wait(4)
    assert job.state.world is None
    assert len(job.wait(1).group_ranks) == 2


def test_a_late_node_makes_the_world_grow_after_a_last_call():
    job = Scenario("2:3").ready(0, 1).wait(5).steps().wait(60).ready(2)
    assert job.generation == 2
    assert job.group_ranks == {0: 0, 1: 1, 2: 2}
    assert not job.state.restarts


def test_a_node_that_is_cut_off_does_not_disturb_a_world_that_does_without_it():
    job = Scenario("2:3").ready(0, 1).wait(60).steps()
    job.transition(2, NodeJoined).transition(2, NodeReady, detail="10.0.0.0 port 1 does not answer").wait(60)
    assert job.group_ranks == {0: 0, 1: 1}
    job.rank_killed(1)
    assert job.group_ranks == {0: 0, 1: 1}
    job.steps().transition(2, NodeReady).wait(60)
    assert job.group_ranks == {0: 0, 1: 1, 2: 2}


def test_a_node_that_is_cut_off_is_tried_where_there_is_no_world_without_it():
    job = Scenario("2:3").ready(0, 1).wait(60).steps()
    job.transition(2, NodeJoined, address="10.0.0.2").transition(2, NodeReady, detail="10.0.0.0 port 1 does not answer")
    job.lost(0)
    assert job.group_ranks == {1: 1, 2: 0}


def test_worlds_are_whole_units():
    nodes = {"worker": {"nodes": {"min": 2, "max": 6, "unit": 2}, "command": ["torchrun", "x.py"]}}
    job = Scenario(roles=nodes).ready(0, 1, 2).wait(5)
    assert len(job.group_ranks) == 2
    assert len(job.steps().ready(3).wait(5).group_ranks) == 4


def test_base_ranks_follow_processes_per_node():
    job = Scenario("2").ready(0, processes=4).ready(1, processes=2)
    world = job.state.world
    assert world is not None
    assert [(m.base_rank, m.processes) for m in world.members.values()] == [(0, 4), (4, 2)]
    assert world.processes == 6


def test_no_world_is_changed_for_growth_while_a_member_cannot_be_told():
    job = Scenario("2:3").ready(0, 1).wait(5).steps().transition(1, NodeUnreachable).ready(2).wait(60)
    assert job.generation == 1
    assert job.transition(1, NodeReachable).generation == 2


def test_a_store_port_serves_one_generation_only():
    job = Scenario("2").running()
    used = set()
    for _ in range(3):
        world = job.state.world
        assert world is not None
        assert (world.store_rank, world.store_port) not in used
        used.add((world.store_rank, world.store_port))
        job.rank_killed(1).steps()


def test_without_a_store_port_the_world_waits_for_one():
    job = Scenario("1")
    job.transition(0, NodeJoined, address="10.0.0.1").transition(0, NodeReady, store_ports=(), processes=1)
    assert job.state.world is None
    assert job.transition(0, NodePortsChanged, store_ports=(5,)).generation == 1


def test_complete_when_all_members_of_one_generation_finished():
    job = Scenario("2").running().finish(0)
    assert job.state.outcome is None
    job.finish(1)
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED
    desire = desires_of(job.state)[0]
    assert (desire.complete_generation, desire.wind_down) == (1, True)
    assert not is_over(job.whole)
    job.take(GroupWoundDown(group=0))
    assert is_over(job.whole)
    assert result_of(job.state, job.now).exit_code == 0


def test_finishing_in_different_generations_is_not_complete():
    job = Scenario("2").running().finish(0).lost(1).ready(1)
    assert job.generation == 2
    job.finish(1)
    assert job.state.outcome is None
    job.finish(0)
    assert job.state.outcome is not None


def test_scale_down_shrinks_the_world_and_removes_the_surplus():
    job = Scenario("3").running().take(ScaleRequested(minimum=2, maximum=2)).those_that_leave_end()
    assert job.generation == 2
    assert job.group_ranks == {0: 0, 1: 1}
    assert job.node(2).phase is NodePhase.REMOVED
    assert 2 not in desires_of(job.state)[0].nodes
    assert job.steps().state.phase is JobPhase.RUNNING
    job.take(ScaleRequested(minimum=3, maximum=3))
    assert job.incarnations[2] == 2
    assert job.generation == 2
    job.ready(2)
    assert job.group_ranks == {0: 0, 1: 1, 2: 2}
    assert not job.state.restarts


def test_suspend_gives_all_nodes_back_and_resume_asks_for_new_ones():
    job = Scenario("2").running().take(SuspendRequested(reason="maintenance"))
    assert job.state.phase is JobPhase.SUSPENDED
    assert not desires_of(job.state)[0].nodes
    job.wait(timedelta(days=2)).take(ResumeRequested())
    assert job.incarnations == {0: 2, 1: 2}
    job.ready(0, 1)
    assert job.generation == 2


def test_suspend_during_a_recovery():
    job = Scenario("2").running().lost(1).take(SuspendRequested())
    assert job.state.phase is JobPhase.SUSPENDED
    job.take(ResumeRequested()).removed(0).ready(0, 1).steps()
    assert job.state.phase is JobPhase.RUNNING
    assert job.incarnations == {0: 2, 1: 3}


def test_restart_asked_by_a_user_costs_no_budget():
    job = Scenario("2").running().take(RestartRequested(reason="new config"))
    assert job.generation == 2
    assert not job.state.restarts
    assert job.state.incidents[-1].failure is None


def test_relaunch_replaces_one_node():
    job = Scenario("2").running().take(RelaunchRequested(rank=1))
    assert job.incarnations == {0: 1, 1: 2}
    assert job.generation == 1
    assert job.removed(1).ready(1).generation == 2


def test_cancel_during_rendezvous():
    job = Scenario("2").ready(0).take(CancelRequested())
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.CANCELLED
    assert desires_of(job.state)[0].wind_down


def test_active_deadline():
    job = Scenario("1", limits={"active_deadline": "1h"}).running().wait(timedelta(hours=1))
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 5


def test_a_job_at_rest_has_no_deadline():
    job = Scenario("3").running()
    assert next_deadline(job.whole, job.job, job.now) is None


def test_a_reset_job_adopts_its_nodes_and_goes_on_with_a_newer_generation():
    before = Scenario("2").running().rank_killed(1).steps()
    views = tuple(
        NodeView(
            rank=node.rank,
            incarnation=node.incarnation,
            phase=node.phase,
            since=node.since,
            token="theirs",
            generation=2,
            address=node.address,
            store_ports=node.store_ports,
        )
        for node in before.state.nodes.values()
    )
    job = Scenario("2").take(GroupAdopted(group=0, nodes=views))
    assert job.generation == 3
    assert job.incarnations == {0: 1, 1: 1}
    assert job.node(0).token == "theirs"


def test_a_group_that_wound_down_for_an_earlier_run_is_not_gone_for_this_one():
    job = Scenario("1").take(GroupWoundDown(group=0)).running().finish(0)
    assert job.state.outcome is not None
    assert not is_over(job.whole)
    assert is_over(job.take(GroupWoundDown(group=0)).whole)


def test_a_command_that_ended_without_a_world_does_not_join_the_next_one():
    """The decision is complete at once: no timer is set, and no event may follow."""
    job = CheckedScenario("1:3")
    job.running().lost(0).steps()
    job.command_ended(0).rank_killed(0).rank_killed(1).steps()
    assert (job.generation, job.group_ranks.keys()) == (3, {1, 2})
    assert job.node(0).ended
