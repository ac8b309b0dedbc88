"""A wait that ended while no worker could decide has its time again: nothing could be learned, and nothing was done."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import FailureClass, JobPhase, Lookup, NodeFacts, NodeView, Restore, RestoreSource
from perdure.contract.transitions import NodeRestoredCheckpoint, NodeUnreachable
from perdure.workflows.policy.capacity.memory_in_place import PATIENCE
from perdure.workflows.policy.facts.events import (
    GroupAdopted,
    RelaunchRequested,
    ResumeRequested,
    SuspendRequested,
    TimePassed,
)
from tests.policy.capacity.test_memory_in_place import killed, pods, raised
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_smaller_requests import pods as smaller_pods
from tests.policy.capacity.test_smaller_requests import waits
from tests.policy.capacity.test_throughput import shared
from tests.policy.checked import CheckedScenario
from tests.policy.job_of_roles import Roles
from tests.policy.repair.test_slow_ranks import job as slow_job
from tests.policy.repair.test_slow_ranks import report
from tests.policy.roles.test_resets import adopt
from tests.policy.scenario import Scenario

HOUR = timedelta(hours=1)
STORAGE = {"storage": "file:///ckpt"}


def away(job: Scenario, duration: timedelta) -> Scenario:
    """No worker is there for so long; the first that the next one takes in is the passing of time."""
    job.now += duration
    return job.take(TimePassed())


def test_a_job_does_not_fail_for_a_replacement_that_no_worker_could_make():
    job = Scenario("2").running().lost(1)
    away(job, HOUR)
    assert job.state.outcome is None
    job.wait(timedelta(minutes=9))
    assert job.state.outcome is None
    job.wait(timedelta(minutes=2))
    assert job.state.outcome is not None
    assert "recovery.replace_timeout" in job.state.outcome.reason


def test_a_job_does_not_fail_before_its_first_world_for_nodes_that_no_worker_could_make():
    job = away(Scenario("2"), HOUR)
    assert job.state.outcome is None
    job.ready(0, 1)
    assert job.state.world is not None


def test_a_wait_that_ends_while_a_member_is_silent_begins_again_with_its_replacement():
    job = CheckedScenario("2").running().lost(1).wait(timedelta(minutes=9, seconds=50))
    job.transition(0, NodeUnreachable, detail="silent")
    while not job.state.nodes[0].incarnation > 1:
        assert job.state.outcome is None
        job.wait(1)
    assert job.state.outcome is None
    job.ready(0, 1).wait(timedelta(minutes=2))
    assert job.generation == 2


def test_a_job_whose_workers_are_there_fails_in_time():
    job = Scenario("2").running().lost(1)
    job.wait(timedelta(minutes=11))
    assert job.state.outcome is not None


def test_the_ranks_of_a_node_that_no_worker_could_end_are_not_presumed_gone():
    job = Scenario("2").running()
    job.take(RelaunchRequested(rank=0))
    [leaving] = job.state.leaving
    away(job, HOUR)
    assert [one.key for one in job.state.leaving] == [leaving.key]
    assert job.state.nodes[0].predecessor == 1
    generation = job.state.generation
    job.ready(0)
    assert job.state.generation == generation, "the earlier incarnation may train"
    job.wait(timedelta(minutes=2))
    assert not job.state.leaving
    assert job.state.generation == generation + 1


def test_a_state_is_not_lost_for_the_time_in_which_no_worker_could_learn_that_its_node_is_back():
    job = Scenario("1:2", checkpoint=STORAGE).running().lost(1)
    lookup = Lookup(complete=40, seen_in_memory=40)
    restore = Restore(step=0, source=RestoreSource.NOTHING, waits=True, lookup=lookup)
    job.transition(0, NodeRestoredCheckpoint, generation=job.generation, restored=restore)
    assert job.state.checkpoints.awaited is not None
    away(job, HOUR)
    assert not job.state.checkpoints.older_because
    job.wait(timedelta(minutes=9))
    assert not job.state.checkpoints.older_because
    job.wait(timedelta(minutes=2))
    assert job.state.checkpoints.gave_up == 40


def test_a_first_world_waits_once_more_for_nodes_whose_reports_no_worker_could_take():
    job = Scenario("2:3").ready(0, 1)
    away(job, timedelta(minutes=2))
    assert job.state.world is None
    job.ready(2)
    assert job.group_ranks.keys() == {0, 1, 2}


def test_a_first_world_is_formed_without_nodes_that_are_not_heard_of_after_an_outage_either():
    job = away(Scenario("2:3").ready(0, 1), timedelta(minutes=2))
    assert job.wait(job.job.timing.rendezvous.last_call).group_ranks.keys() == {0, 1}


def test_a_peer_is_not_blamed_for_a_failure_whose_report_no_worker_could_take():
    job = Scenario("3").running().peer_failed(0)
    away(job, timedelta(minutes=1))
    assert job.state.interruption is not None
    assert not job.state.interruption.decided
    job.rank_raised(1)
    assert (job.incident.culprit, job.incident.failure) == (1, FailureClass.USER_CODE)


def test_peers_are_restarted_when_nothing_else_is_reported_after_an_outage_either():
    job = away(Scenario("3").running().peer_failed(0), timedelta(minutes=1))
    job.wait(job.job.timing.rendezvous.victim_grace)
    assert job.generation == 2
    assert job.incident.failure is FailureClass.PEER_LOST


def test_a_silent_member_of_a_broken_world_has_time_to_be_heard_after_an_outage():
    job = Scenario("3").running().lost(2)
    job.transition(1, NodeUnreachable)
    away(job, HOUR)
    assert job.node(1).incarnation == 1
    job.wait(timedelta(seconds=16))
    assert job.node(1).incarnation == 2


@pytest.mark.parametrize("outage", [timedelta(minutes=4), HOUR])
def test_a_machine_does_not_fail_its_checks_for_a_report_that_no_worker_could_take(outage: timedelta):
    job = Scenario("2", preflight="quick")
    job.ready(0, 1).checked(0)
    assert job.state.world is None
    away(job, outage)
    assert job.node(1).incarnation == 1
    job.checked(1)
    assert job.state.world is not None


def test_nodes_for_a_faster_world_are_not_given_up_for_the_time_in_which_no_worker_could_make_them():
    job = ScaledJob(law=shared(8, 0.25), room=6, patience="10m").settle()
    assert job.state.nodes_max == 13
    away(job, HOUR)
    assert job.state.nodes_max == 13
    job.room = 16
    assert job.arrive().settle().sizes == [6, 2, 6, 13]


def test_a_rank_that_was_slow_before_an_outage_is_not_replaced_before_it_can_be_heard_of():
    job = report(slow_job("replace"), [2])
    away(job, HOUR)
    assert job.incarnations[2] == 1
    report(job).wait(timedelta(minutes=1))
    assert job.incarnations[2] == 1


def test_a_rank_that_is_slow_after_an_outage_is_replaced():
    job = away(report(slow_job("replace"), [2]), HOUR)
    assert job.wait(timedelta(seconds=16)).incarnations[2] == 2


def test_a_node_is_not_replaced_for_memory_that_no_worker_could_give_it():
    job = away(killed(pods().running()), HOUR)
    assert (job.node(1).incarnation, job.generation) == (1, 1)
    raised(job)
    assert (job.node(1).incarnation, job.generation) == (1, 2)
    job = away(killed(pods().running()), HOUR).wait(PATIENCE)
    assert job.node(1).incarnation == 2


def test_nodes_do_not_request_less_for_a_machine_that_may_have_come_while_no_worker_was_there():
    job = waits(smaller_pods({"cpu": 8}), 0, 1)
    away(job, HOUR)
    assert [job.node(rank).incarnation for rank in (0, 1)] == [1, 1]
    job.wait(60)
    assert [job.node(rank).incarnation for rank in (0, 1)] == [2, 2]


def roles_away(job: Roles, duration: timedelta) -> Roles:
    job.now += duration
    return job.take(TimePassed())


def phases(job: Roles) -> dict[str, JobPhase]:
    return {name: role.phase for name, role in job.state.roles.items()}


@pytest.mark.parametrize("lost", [("a",), ("b",), ("a", "b")])
def test_each_role_of_a_job_has_its_wait_again(lost: tuple[str, ...]):
    job = Roles(a={}, b={}).runs("a", "b")
    for role in lost:
        job.lost(role, 1)
    generations = [job.view(role).generation for role in ("a", "b")]
    roles_away(job, HOUR)
    assert phases(job) == {role: JobPhase.WAITING if role in lost else JobPhase.RUNNING for role in ("a", "b")}
    assert [job.view(role).generation for role in ("a", "b")] == generations
    job.wait(9 * 60)
    assert job.state.outcome is None
    job.wait(2 * 60)
    assert job.state.outcome is not None
    assert "recovery.replace_timeout" in job.state.outcome.reason


def test_a_role_that_waits_for_another_one_that_came_in_an_outage_is_started():
    job = Roles(trainer={"depends_on": {"ps": "ready"}}, ps={"ready": {"port": 6000}})
    roles_away(job, HOUR)
    assert phases(job) == {"trainer": JobPhase.STARTING, "ps": JobPhase.STARTING}
    job.runs("ps", "trainer")
    assert phases(job) == {"trainer": JobPhase.RUNNING, "ps": JobPhase.RUNNING}


def test_a_role_that_rests_and_one_that_is_over_change_nothing_for_the_others_after_an_outage():
    job = Roles(trainer={"depends_on": {"data": "completed"}}, data={"nodes": 1}, evaluator={"ends_job": False})
    job.runs("data").command_ended("data").removed("data").runs("trainer", "evaluator")
    job.take(SuspendRequested(role="evaluator")).removed("evaluator").lost("trainer", 0)
    roles_away(job, HOUR)
    assert phases(job) == {
        "trainer": JobPhase.WAITING,
        "data": JobPhase.SUCCEEDED,
        "evaluator": JobPhase.SUSPENDED,
    }
    job.take(ResumeRequested(role="evaluator")).runs("evaluator").removed("trainer").runs("trainer")
    assert phases(job) == {
        "trainer": JobPhase.RUNNING,
        "data": JobPhase.SUCCEEDED,
        "evaluator": JobPhase.RUNNING,
    }


def test_all_roles_of_a_job_that_is_suspended_make_another_checkpoint_after_an_outage():
    job = Roles(storage="file:///ckpt", a={}, b={}).runs("a", "b").take(SuspendRequested())
    known = job.state.roles["a"]
    saved = known.checkpoints.replace(answered=known.checkpoints.requests)
    job.state = job.state.with_role(known.replace(checkpoints=saved))
    roles_away(job, HOUR)
    assert phases(job) == {"a": JobPhase.RUNNING, "b": JobPhase.RUNNING}, "b may need what a has trained since"
    assert [role.checkpoints.requests for role in job.state.roles.values()] == [2, 2]
    job.wait(61)
    assert phases(job) == {"a": JobPhase.SUSPENDED, "b": JobPhase.SUSPENDED}


def test_an_unreachable_node_of_one_role_has_time_to_be_heard_and_the_other_role_trains_on():
    job = Roles(a={"nodes": 3}, b={}).runs("a", "b").lost("a", 2)
    job.transition("a", 1, NodeUnreachable)
    before = job.view("b").generation
    roles_away(job, HOUR)
    assert job.view("a").nodes[1].incarnation == 1
    job.wait(16)
    assert job.view("a").nodes[1].incarnation == 2
    assert (job.view("b").generation, phases(job)["b"]) == (before, JobPhase.RUNNING)


@pytest.mark.parametrize("missed", ["its wait", "its wait, and the return of the node"])
def test_a_job_that_is_reset_to_a_wait_of_long_ago_has_it_again(missed: str):
    job = Scenario("2").running().lost(1)
    assert job.state.phase is JobPhase.WAITING
    away(job, HOUR)
    assert job.state.outcome is None
    if "return" in missed:
        views = [
            NodeView(
                **node.part(NodeFacts),
                rank=node.rank,
                incarnation=node.incarnation,
                token="theirs",
                generation=2,
            )
            for node in job.state.nodes.values()
        ]
        job.take(GroupAdopted(group=0, nodes=tuple(views)))
    job.wait(timedelta(minutes=9))
    assert job.state.outcome is None
    job.removed(1).ready(1)
    assert job.state.world is not None
    assert job.generation == 2 + ("return" in missed)


def test_a_job_of_roles_that_is_reset_to_its_beginning_while_no_worker_is_there_adopts_all_nodes():
    earlier = Roles(a={}, b={}).runs("a", "b")
    job = roles_away(Roles(a={}, b={}), HOUR)
    assert job.state.outcome is None
    adopt(job, earlier, "a")
    roles_away(job, HOUR)
    assert job.state.outcome is None
    adopt(job, earlier, "b")
    job.steps("a").steps("b")
    assert phases(job) == {"a": JobPhase.RUNNING, "b": JobPhase.RUNNING}
    assert [role.generation for role in job.state.roles.values()] == [2, 2]
