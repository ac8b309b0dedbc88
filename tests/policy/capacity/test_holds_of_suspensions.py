"""A suspension waits until the ranks stand at a step that is stored."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import (
    CheckpointRef,
    HoldRequest,
    JobPhase,
    SnapshotUse,
    StoredCheckpoint,
)
from perdure.contract.transitions import NodeStoredCheckpoint
from perdure.workflows.policy.decide import apply_events
from perdure.workflows.policy.facts.events import (
    RelaunchRequested,
    ResumeRequested,
    SuspendRequested,
    TimePassed,
)
from perdure.workflows.policy.state.checkpoint import DurableCheckpoint
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.capacity.holds import SPLIT, STORAGE, WITHIN, held, hold, training
from tests.policy.capacity.test_planned_changes import make_durable
from tests.policy.scenario import UID


def test_a_suspended_job_keeps_no_memory_to_wait_for():
    job = training().take(SuspendRequested())
    assert job.state.phase is JobPhase.SUSPENDED
    assert any("is in the memory of the nodes only, and lost with them" in one.text for one in job.incident.evidence)


@pytest.mark.parametrize("use", [SPLIT, SnapshotUse(replicated=True, copies=0)], ids=["split", "replicated"])
def test_a_job_is_suspended_at_the_step_that_is_stored(use: SnapshotUse):
    job = training(use=use, **STORAGE).take(SuspendRequested())
    assert hold(job) == HoldRequest(number=1, generation=1, stores=1, within=WITHIN)
    assert desires_of(job.state)[0].checkpoint_request == 1
    held(job, step=30)
    assert job.state.phase is JobPhase.RUNNING
    make_durable(job, step=30, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED
    assert any("is durable: all ranks waited at it, and no step is lost" in one.text for one in job.incident.evidence)


def test_a_suspension_does_not_have_ranks_wait_that_keep_no_state_in_memory():
    job = training(use=None, **STORAGE).take(SuspendRequested())
    assert (hold(job), desires_of(job.state)[0].checkpoint_request) == (None, 1)
    make_durable(job, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_job_whose_ranks_cannot_wait_is_suspended_once_another_step_is_durable():
    job = training(**STORAGE).take(SuspendRequested())
    held(job, problem="rank 1 has no room to save step 30")
    assert (hold(job), job.state.phase) == (None, JobPhase.RUNNING)
    make_durable(job, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED
    assert not any("no step is lost" in one.text for one in job.incident.evidence)


def test_a_resume_has_the_ranks_train_on():
    job = training(**STORAGE).take(SuspendRequested()).take(ResumeRequested())
    assert (hold(job), job.state.postponed) == (None, None)
    make_durable(job, answers=1)
    job.wait(timedelta(minutes=5))
    assert (job.generation, job.state.phase) == (1, JobPhase.RUNNING)


def test_a_suspension_does_not_take_the_checkpoint_of_a_change_that_waits():
    job = training(**STORAGE).take(RelaunchRequested(rank=1)).take(SuspendRequested())
    assert hold(job) == HoldRequest(number=1, generation=1, stores=2, within=WITHIN)
    make_durable(job, step=20, answers=1)
    assert (job.state.phase, job.node(1).incarnation) == (JobPhase.RUNNING, 1)
    make_durable(job, step=30, answers=2)
    assert job.state.phase is JobPhase.SUSPENDED
    job = training().take(RelaunchRequested(rank=1))
    assert hold(job) is not None
    job.take(SuspendRequested())
    assert job.state.phase is JobPhase.SUSPENDED, "without a storage nothing is kept"


@pytest.mark.parametrize("is_answered", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("failure", ["a rank is killed", "a node is lost"])
def test_ranks_of_the_world_after_a_failure_wait_at_the_step_that_is_stored_for_a_suspension(
    failure: str, is_answered: bool
):
    job = training(**STORAGE).take(SuspendRequested())
    if is_answered:
        held(job, step=30)
    job.now += timedelta(seconds=10)
    if failure == "a rank is killed":
        job.rank_killed(1)
    else:
        job.lost(1).removed(1).ready(1)
    assert job.generation == 2
    assert hold(job) == HoldRequest(number=2, generation=2, stores=1, within=timedelta(seconds=50))
    job.steps()
    assert job.state.phase is JobPhase.RUNNING
    held(job, step=34)
    make_durable(job, step=34, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED
    assert any("is durable: all ranks waited at it, and no step is lost" in one.text for one in job.incident.evidence)


def test_a_step_that_the_ranks_of_an_older_world_have_waited_at_is_not_taken_for_that_of_a_suspension():
    job = held(training(**STORAGE).take(SuspendRequested()), step=30)
    job.rank_killed(1).steps()
    make_durable(job, step=34, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED
    assert not any("no step is lost" in one.text for one in job.incident.evidence)


def test_a_suspension_of_ranks_that_could_not_wait_requests_nothing_of_those_that_follow():
    job = training(**STORAGE).take(SuspendRequested())
    held(job, problem="rank 1 has no room to save step 30")
    job.rank_killed(1).steps()
    assert (job.generation, hold(job), job.state.phase) == (2, None, JobPhase.RUNNING)
    make_durable(job, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_suspension_whose_worker_is_always_late_claims_no_step():
    job = training(**STORAGE).take(SuspendRequested())
    for number in range(1, 5):
        assert job.state.phase is JobPhase.RUNNING
        request = hold(job)
        assert request is not None
        asked_at = job.now
        job.now += timedelta(minutes=5)
        checkpoint = CheckpointRef(step=40 + number, run=UID, generation=1)
        waiting = StoredCheckpoint(checkpoint=checkpoint, answers=request.number, in_memory=True)
        job.whole = apply_events(
            job.whole,
            [
                NodeStoredCheckpoint(
                    rank=0,
                    incarnation=1,
                    time=asked_at + timedelta(seconds=5),
                    generation=1,
                    stored=waiting,
                ),
            ],
            job.job,
            job.now,
        )
        if number == 4:
            known = job.state.checkpoints
            durable = DurableCheckpoint(checkpoint=checkpoint, committed_at=asked_at)
            job.state = job.state.replace(checkpoints=known.replace(durable=durable, answered=known.requests))
        job.take(TimePassed())
    assert job.state.phase is JobPhase.SUSPENDED
    [text] = [one.text for one in job.incident.evidence if "is durable" in one.text]
    assert "no step is lost" not in text
    assert "had trained on when the change was made" in text
