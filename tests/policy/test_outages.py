"""A wait that ended while no worker could decide has its time again: nothing could be learned, and nothing was done."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import Lookup, Restore, RestoreSource
from perdure.contract.transitions import NodeRestoredCheckpoint, NodeUnreachable
from perdure.workflows.policy.facts.events import RelaunchRequested, TimePassed
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_throughput import shared
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
