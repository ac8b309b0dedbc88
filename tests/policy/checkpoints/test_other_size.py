"""States that only a world of one size can load: the job waits for its nodes, and charges nothing for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import AwaitNodes, JobPhase, NodePhase, ReplaceNodes, RestoreSource
from perdure.workflows.policy.facts.events import ResumeRequested, ScaleRequested, SuspendRequested
from tests.policy.capacity.test_planned_changes import make_durable
from tests.policy.checkpoints.test_commits import restored
from tests.policy.scenario import Scenario

STORAGE: dict[str, Any] = {"checkpoint": {"storage": "file:///ckpt"}}
PROBLEM = "expert differs between the 3 ranks that saved it"
REFUSED: dict[str, Any] = {"step": 313, "source": RestoreSource.MEMORY, "refused": PROBLEM, "of_ranks": 3}


def shrunk(**spec: Any) -> Scenario:
    """A job of 2 to 3 nodes that continues with two, while the third is replaced."""
    job = Scenario("2:3", **spec).running().lost(2)
    assert (job.generation, job.state.world and job.state.world.nodes) == (2, 2)
    return job


def test_a_world_that_cannot_load_the_state_waits_for_the_replacement_and_nothing_is_charged():
    job = shrunk()
    restarts = job.state.restart_count
    restored(job, generation=2, **REFUSED)
    assert job.state.phase is JobPhase.WAITING
    assert "2 of 3 nodes are ready; the state of step 313 needs 3 nodes (expert differs" in job.state.reason
    assert [type(one) for one in job.incident.actions][-1:] == [AwaitNodes]
    assert any(f"step 313 in memory was not loaded: {PROBLEM}" in one.text for one in job.incident.evidence)
    # Its ranks end by themselves, or are ended.
    job.rank_raised(0, "KeyError: expert").rank_raised(1, "KeyError: expert")
    assert job.generation == 2
    job.removed(2).ready(2)
    assert (job.generation, job.state.world and job.state.world.nodes) == (3, 3)
    assert job.state.restart_count == restarts
    job.steps()
    restored(job, generation=3, step=313, source=RestoreSource.MEMORY, again=1)
    assert job.state.phase is JobPhase.RUNNING
    assert job.incident.restored_step == 313


def test_the_next_loss_waits_at_once():
    job = shrunk()
    restored(job, generation=2, **REFUSED)
    job.removed(2).ready(2).steps()
    restored(job, generation=3, step=313, source=RestoreSource.MEMORY)
    job.lost(1)
    assert (job.generation, job.state.phase) == (3, JobPhase.WAITING)
    assert [type(one) for one in job.incident.actions] == [ReplaceNodes, AwaitNodes]
    assert job.incident.rule.startswith("node-loss/6")
    job.removed(1).ready(1)
    assert (job.generation, job.state.world and job.state.world.nodes) == (4, 3)


def test_the_job_stops_with_the_reason_where_no_node_comes():
    job = shrunk()
    restored(job, generation=2, **REFUSED)
    job.wait(timedelta(minutes=11))
    assert job.state.outcome is not None
    assert (job.state.outcome.phase, job.state.outcome.exit_code) == (JobPhase.FAILED, 3)
    assert "recovery.replace_timeout" in job.state.outcome.reason
    assert "the state of step 313 needs 3 nodes" in job.state.outcome.reason


def test_a_job_that_was_scaled_down_waits_until_a_user_scales_it_up():
    job = Scenario("3").running().take(ScaleRequested(minimum=2, maximum=2)).those_that_leave_end()
    assert (job.generation, job.state.world and job.state.world.nodes) == (2, 2)
    restored(job, generation=2, **REFUSED)
    assert "`perdure scale 3`" in job.state.reason
    job.take(ScaleRequested(minimum=3, maximum=3)).ready(2)
    assert (job.generation, job.state.world and job.state.world.nodes) == (3, 3)


def test_neither_growth_nor_a_smaller_number_ends_a_world_whose_state_is_of_its_size():
    job = shrunk()
    restored(job, generation=2, **REFUSED)
    job.removed(2).ready(2).steps()
    restored(job, generation=3, step=313, source=RestoreSource.MEMORY)
    job.take(ScaleRequested(minimum=2, maximum=4)).ready(3)
    assert (job.generation, job.state.phase) == (3, JobPhase.RUNNING)
    job.take(ScaleRequested(minimum=2, maximum=2))
    assert (job.generation, job.state.phase) == (3, JobPhase.RUNNING)
    assert job.node(2).phase is not NodePhase.LOST


def test_a_checkpoint_of_another_run_that_no_world_of_the_job_can_load_stops_it():
    job = Scenario("2").running()
    found = REFUSED | {"source": RestoreSource.STORAGE, "folder": "step-313-earlier-4"}
    restored(job, generation=1, **found)
    assert job.state.outcome is not None
    assert (job.state.outcome.phase, job.state.outcome.exit_code) == (JobPhase.FAILED, 1)
    assert "submit the job with nodes: 3" in job.state.outcome.reason
    assert PROBLEM in job.state.outcome.reason


def test_a_state_that_another_world_has_loaded_is_bound_to_no_size():
    job = shrunk()
    restored(job, generation=2, **REFUSED)
    assert job.state.checkpoints.bound is not None
    restored(job, generation=2, step=300, source=RestoreSource.STORAGE)
    assert job.state.checkpoints.bound is None


def resumed_with_two(job: Scenario) -> Scenario:
    """It was suspended while its state was bound to three nodes, and two come back."""
    job.removed(2).ready(2).steps()
    restored(job, generation=3, step=313, source=RestoreSource.MEMORY)
    job.take(SuspendRequested()).wait(timedelta(minutes=2))
    assert job.state.phase is JobPhase.SUSPENDED
    job.take(ResumeRequested()).removed(0, 1, 2).ready(0, 1)
    return job.wait(timedelta(minutes=1))


@pytest.mark.parametrize("spec", [{}, STORAGE], ids=["no storage", "nothing stored"])
def test_a_job_whose_memory_a_suspension_has_ended_is_bound_to_no_size(spec: dict[str, Any]):
    job = shrunk(**spec)
    restored(job, generation=2, **REFUSED)
    resumed_with_two(job)
    assert (job.state.generation, job.state.world and job.state.world.nodes) == (4, 2)


def test_a_stored_state_stays_bound_to_its_size_through_a_suspension():
    job = shrunk(**STORAGE)
    make_durable(job.steps())
    restored(job, generation=2, **REFUSED)
    resumed_with_two(job)
    assert (job.state.generation, job.state.phase) == (3, JobPhase.WAITING)
    assert "the state of step 313 needs 3 nodes" in job.state.reason


def test_a_role_that_is_suspended_alone_is_bound_to_no_size_either():
    job = shrunk()
    restored(job, generation=2, **REFUSED)
    job.take(SuspendRequested(role="worker"))
    assert job.state.checkpoints.bound is None
