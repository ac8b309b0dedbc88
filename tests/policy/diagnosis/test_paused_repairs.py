"""Tests of a job whose user has paused repairs: what does not die is shown and left as it is, for that time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass
from perdure.contract.transitions import NodeStalled, NodeStallLook
from perdure.contract.worlds import UnsoundSteps
from perdure.workflows.policy.facts.events import RepairsPaused, RepairsResumed
from perdure.workflows.policy.record import projections
from tests.policy.diagnosis.stalled_ranks import LOCK, STOPPED, WAITS, look, sleeps
from tests.policy.scenario import Scenario

HOUR = timedelta(hours=1)


def paused(nodes: str = "3", **spec: Any) -> Scenario:
    job = Scenario(nodes, **spec).running()
    return job.take(RepairsPaused(until=job.now + HOUR, reason="gdb"))


def stall(job: Scenario, *ranks: dict[str, Any]) -> Scenario:
    generation = job.generation
    for node, rank in enumerate(ranks):
        job.transition(node, NodeStalled, generation=generation)
        seen = look(rank, first=node, generation=generation, taken_at=job.now)
        job.transition(node, NodeStallLook, generation=generation, look=seen)
    return job


@pytest.mark.parametrize("rank", [STOPPED, sleeps(LOCK)])
def test_a_hang_is_shown_and_judged_again_once_the_pause_is_over(rank: dict[str, Any]):
    job = stall(paused(), WAITS, rank, WAITS)
    assert job.generation == 1
    assert "rank 1 of node 1" in job.state.reason
    job.wait(HOUR + timedelta(seconds=1))
    assert job.state.repairs_paused_until is None
    assert job.generation == 1
    stall(job, WAITS, rank, WAITS)
    assert job.generation == 2


def test_a_user_ends_the_pause():
    job = stall(paused().take(RepairsResumed()), WAITS, STOPPED, WAITS)
    assert job.generation == 2


def test_what_dies_is_repaired():
    job = paused()
    job.rank_killed(1)
    assert job.generation == 2
    assert job.state.repairs_paused_until is not None


def shown(job: Scenario) -> str:
    """The only entry, for users."""
    (entry,) = job.state.incidents
    assert entry.observation is not None
    return explanation(entry, job="llama", flag="").plain


def test_a_loss_that_is_no_number_is_shown_and_ends_the_world_after_the_pause():
    job = paused(recovery={"on_nan": "rollback"}).bad_loss(1, 100).bad_loss(2, 100).wait(60)
    assert job.generation == 1
    text = shown(job)
    assert "the loss of rank 1 is nan at step 100; repairs were paused, and training continued" in text
    assert "the loss of rank 2 is nan" in text
    assert "nothing: a user had paused repairs" in text
    assert "perdure resume-repairs llama" in text
    job.wait(HOUR)
    assert (job.generation, job.incident.failure) == (2, FailureClass.NUMERIC)


def test_a_wrong_result_is_shown_and_ends_the_world_after_the_pause_for_no_rank_finds_it_again():
    job = paused().wrong_result(1, 100, checksums=("those of rank 1 are a1",)).wait(60)
    assert (job.generation, job.state.interruption) == (1, None)
    assert "computed wrong gradients at step 100" in shown(job)
    job.wait(HOUR)
    assert (job.incident.failure, job.incident.culprit) == (FailureClass.CORRUPTION, 1)
    assert [sign.text for sign in job.incident.evidence][1:] == ["those of rank 1 are a1"]
    assert job.state.checkpoints.unsound == UnsoundSteps(generation=1, after=99, found_at=-1)
    assert job.incarnations[1] == 2


def test_a_wrong_result_of_a_world_that_has_ended_meanwhile_is_not_acted_on():
    job = paused().wrong_result(1, 100)
    job.rank_killed(2).wait(2 * HOUR)
    assert (job.generation, job.incident.failure) == (2, FailureClass.KILLED)


def test_the_pause_is_a_warning_with_its_end_and_its_reason():
    job = paused()
    (warning,) = projections.warnings_of(job.state, job.job)
    assert warning.startswith("hangs, slow ranks, bad numbers and wrong results are shown and not repaired until ")
    assert "(gdb)" in warning
    job.wait(HOUR)
    assert projections.warnings_of(job.state, job.job) == ()
