"""Golden tables of how long a job waits for nodes, its status meanwhile, and its action afterwards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import JobPhase, NodePhase
from perdure.contract.transitions import NodeCreated, NodeJoined, NodePending
from perdure.workflows.policy.record.projections import next_action, node_views
from tests.policy.scenario import Scenario

GATED = "its queue has not admitted it (SchedulingGated)"
UNSCHEDULABLE = "no machine can take it (Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.)"
NOT_PULLED = "training: its image cannot be pulled (ErrImagePull: torch:1: not found)"
HOUR = timedelta(hours=1)


def queued(job: Scenario, *ranks: int, why: str = GATED) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodePending, detail=why, queued=True)
    return job


@pytest.mark.parametrize(
    ("nodes", "limits", "in_queue", "after", "phase", "field"),
    [
        ("2", {}, (0, 1), 100 * HOUR, JobPhase.WAITING, ""),
        ("2", {"queue_timeout": "1h"}, (0, 1), HOUR - timedelta(seconds=1), JobPhase.WAITING, ""),
        ("2", {"queue_timeout": "1h"}, (0, 1), HOUR, JobPhase.STOPPING, "limits.queue_timeout"),
        # One node short of the smallest world is as good as none.
        ("2", {"queue_timeout": "1h"}, (1,), HOUR, JobPhase.STOPPING, "limits.queue_timeout"),
        # Enough have a machine: theirs is the failure to come.
        ("1:2", {"queue_timeout": "1h"}, (1,), timedelta(minutes=10), JobPhase.STOPPING, "rendezvous.join_timeout"),
        ("2", {"queue_timeout": "1h"}, (), timedelta(minutes=10), JobPhase.STOPPING, "rendezvous.join_timeout"),
    ],
)
def test_the_first_world_waits_in_the_queue_for_as_long_as_the_job_says(
    nodes: str, limits: dict[str, Any], in_queue: tuple[int, ...], after: timedelta, phase: JobPhase, field: str
) -> None:
    job = queued(Scenario(nodes, limits=limits), *in_queue).wait(after)
    assert job.state.phase is phase
    assert field in job.state.reason
    assert not in_queue or GATED in job.state.reason
    assert job.state.outcome is None or job.state.outcome.exit_code == 3


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_an_agent_that_joins_does_not_hide_why_its_command_cannot_start(nodes: str) -> None:
    job = Scenario(nodes)
    for rank in (0, 1):
        job.transition(rank, NodeJoined, address=f"10.0.0.{rank}").transition(rank, NodePending, detail=NOT_PULLED)
    assert job.state.reason == f"0 of 2 nodes are ready; node 0: {NOT_PULLED}"
    assert next_action(job.state, job.job) == f"waits for node 0 (pending: {NOT_PULLED})"
    job.wait(timedelta(minutes=10))
    assert job.state.phase is JobPhase.STOPPING
    assert job.state.reason.endswith(f"node 0: {NOT_PULLED}")


def test_a_replacement_whose_command_cannot_start_is_no_member_of_the_next_world() -> None:
    job = Scenario("1:2").running().lost(1)
    job.transition(1, NodeJoined, address="10.0.0.1").transition(1, NodePending, detail=NOT_PULLED)
    job.steps()
    job.rank_killed(0).ready(0, after=job.generation)
    assert job.state.world is not None
    assert list(job.state.world.members) == [0]


def test_what_was_waited_in_the_queue_does_not_count_for_joining() -> None:
    job = queued(Scenario("2", limits={"queue_timeout": "2h"}), 0, 1).wait(HOUR)
    assert job.state.reason == (
        f"0 of at least 2 nodes are ready; node 0: {GATED}; stops at 02:00:00 UTC (limits.queue_timeout)"
    )
    for rank in (0, 1):
        job.transition(rank, NodeCreated)
    job.wait(timedelta(minutes=9))
    assert job.state.phase is JobPhase.STARTING
    # A machine that is lost sends the job back into the queue, where its time continues.
    job.lost(0)
    queued(job, 0, why=UNSCHEDULABLE).wait(timedelta(minutes=50))
    assert job.state.phase is JobPhase.WAITING
    assert UNSCHEDULABLE in job.state.reason
    job.wait(timedelta(minutes=1))
    assert job.state.phase is JobPhase.STOPPING
    assert "after 2h (limits.queue_timeout)" in job.state.reason


@pytest.mark.parametrize(("limits", "told"), [({}, True), ({"queue_timeout": "2h"}, False)])
def test_a_job_that_waits_without_limit_says_that_it_holds_machines(limits: dict[str, Any], told: bool) -> None:
    """Another may hold those that this one waits for, and wait for these."""
    words = "1 node keeps a machine meanwhile, for which other jobs may wait"
    job = queued(Scenario("2", limits=limits), 0, 1, why=UNSCHEDULABLE).wait(HOUR)
    assert words not in job.state.reason
    job.transition(0, NodeCreated).wait(HOUR / 2)
    assert job.state.phase is JobPhase.WAITING
    assert (words in job.state.reason) is told


def test_an_elastic_job_begins_without_those_that_are_in_the_queue() -> None:
    job = queued(Scenario("1:2", limits={"queue_timeout": "1h"}), 1).ready(0).wait(6).steps()
    assert job.group_ranks == {0: 0}
    job.wait(100 * HOUR)
    assert job.state.phase is JobPhase.RUNNING
    job.transition(1, NodeCreated).ready(1)
    assert job.group_ranks == {0: 0, 1: 1}


def test_a_resumed_job_waits_in_the_queue_anew() -> None:
    from perdure.workflows.policy.facts.events import ResumeRequested, SuspendRequested

    job = queued(Scenario("1", limits={"queue_timeout": "1h"}), 0).wait(HOUR / 2)
    job.take(SuspendRequested()).wait(HOUR).take(ResumeRequested())
    queued(job, 0).wait(HOUR - timedelta(seconds=1))
    assert job.state.phase is JobPhase.WAITING
    assert job.wait(1).state.phase is JobPhase.STOPPING


@pytest.mark.parametrize(
    ("nodes", "choice", "said", "phase"),
    [
        ("2", "shrink", "stops at 00:10:00 UTC (recovery.replace_timeout)", JobPhase.STOPPING),
        ("1:2", "wait", "continues without it at 00:10:00 UTC (recovery.replace_timeout)", JobPhase.RECOVERING),
    ],
)
def test_a_replacement_that_does_not_come_is_told_with_the_scheduler_s_words(
    nodes: str, choice: str, said: str, phase: JobPhase
) -> None:
    job = queued(Scenario(nodes, recovery={"on_capacity_loss": choice}).running().lost(1), 1, why=UNSCHEDULABLE)
    assert job.state.phase is JobPhase.WAITING
    assert job.state.reason.endswith(f"node 1: {UNSCHEDULABLE}; {said}")
    assert job.state.incidents[-1].waited_for == f"node 1: {UNSCHEDULABLE}"
    assert job.wait(timedelta(minutes=10)).state.phase is phase


def test_a_replacement_that_entered_its_world_without_a_request_is_not_waited_for() -> None:
    job = Scenario("2").running().lost(1).transition(1, NodeJoined, address="10.0.0.9")
    assert job.generation == 2
    assert next_action(job.state, job.job) == "waits for node 1 (joined)"
    job.steps()
    assert (job.state.phase, next_action(job.state, job.job)) == (JobPhase.RUNNING, "nothing to do")
    assert node_views(job.state)[1].phase is NodePhase.READY
    job.command_exited(1)
    assert next_action(job.state, job.job) == "waits for node 1 (joined)"
