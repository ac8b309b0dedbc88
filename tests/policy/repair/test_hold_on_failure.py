"""Golden tables of failed jobs whose nodes are held for inspection."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from perdure.contract import JobPhase
from perdure.contract.transitions import NodeCreateFailed, NodePending
from perdure.workflows.policy.facts.events import CancelRequested, GroupWoundDown
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of, is_over
from tests.policy.scenario import Scenario


def scene(*, nodes: str = "2", hold: str = "30m", deadline: str = "1h") -> Scenario:
    return Scenario(nodes, hold_on_failure=hold, limits={"active_deadline": deadline})


def fail(job: Scenario) -> Scenario:
    """By an exit code that is never repaired."""
    return job.running().rank_raised(1, exit_code=2)


def test_the_nodes_of_a_failed_job_are_kept_as_they_are_until_the_time_is_over():
    job = fail(scene())
    kept = desires_of(job.state)[0]
    assert job.state.phase is JobPhase.HELD
    assert (set(kept.nodes), kept.wind_down, kept.world) == ({0, 1}, False, job.state.world)
    assert next_deadline(job.whole, job.job, job.now) == job.now + timedelta(minutes=30)
    assert "until 2026-01-01 00:30:00 UTC (hold_on_failure)" in next_action(job.state, job.job)
    # What goes meanwhile is not made again, and nothing else is decided.
    job.lost(1).rank_killed(0).wait(timedelta(minutes=29))
    assert set(desires_of(job.state)[0].nodes) == {0}
    assert job.state.phase is JobPhase.HELD
    job.wait(timedelta(minutes=1))
    assert job.state.phase is JobPhase.STOPPING
    assert desires_of(job.state)[0].wind_down
    assert next_deadline(job.whole, job.job, job.now) is None
    assert not is_over(job.whole)
    assert is_over(job.take(GroupWoundDown(group=0)).whole)
    assert job.state.outcome is not None
    assert (job.state.outcome.phase, job.state.outcome.exit_code) == (JobPhase.FAILED, 1)


def test_cancelling_lets_them_go_and_the_job_has_failed_all_the_same():
    job = fail(scene()).take(CancelRequested(reason="seen enough"))
    assert job.state.phase is JobPhase.STOPPING
    assert desires_of(job.state)[0].wind_down
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.FAILED


@pytest.mark.parametrize(
    "ends",
    [
        lambda: fail(scene(hold="0s")),
        lambda: scene().running().finish(0, 1),
        lambda: scene().running().take(CancelRequested()),
        lambda: scene().running().wait(timedelta(hours=1)),
        # Nothing of its nodes is there to be looked at.
        lambda: scene().transition(0, NodePending).transition(1, NodePending).wait(timedelta(minutes=10)),
        lambda: scene(nodes="1").transition(0, NodeCreateFailed, detail="no such image"),
    ],
    ids=["hold is 0", "finished", "cancelled", "deadline", "never started", "refused"],
)
def test_others_are_not_held(ends: Callable[[], Scenario]):
    job = ends()
    assert job.state.outcome is not None
    assert job.state.phase is JobPhase.STOPPING
    assert desires_of(job.state)[0].wind_down
