"""Ranks that wait at a step while their job is reset, or continues as new."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import (
    JobPhase,
)
from perdure.workflows.policy.checkpoints import commits
from perdure.workflows.policy.facts.events import (
    ScaleRequested,
    SuspendRequested,
)
from perdure.workflows.policy.state.job import JobState
from tests.policy.capacity.holds import PROBLEM, STORAGE, held, hold, size, training
from tests.policy.capacity.test_planned_changes import make_durable
from tests.policy.scenario import Scenario


def reset(job: Scenario, *, to: Scenario) -> Scenario:
    """The job has forgotten what has happened since."""
    job.whole = to.whole
    job.whole = job.whole.with_view(commits.renumber(job.state, job.now))
    return job


def test_a_job_that_was_reset_gives_no_number_again_that_its_ranks_have_followed():
    job, before = training(), training()
    job.take(ScaleRequested(minimum=2, maximum=2))
    followed = hold(job)
    assert followed is not None
    held(job, problem=PROBLEM)
    reset(job, to=before).take(ScaleRequested(minimum=2, maximum=2))
    request = hold(job)
    assert request is not None
    assert (request.number > followed.number, request.generation) == (True, followed.generation)
    held(job, number=followed.number)
    assert (job.generation, job.state.postponed is not None) == (1, True), "that was the answer to another request"
    held(job)
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)


@pytest.mark.parametrize("change", [ScaleRequested(minimum=2, maximum=2), SuspendRequested()], ids=["scale", "suspend"])
def test_a_request_whose_answer_a_reset_job_may_have_forgotten_is_made_again(change: Any):
    spec = STORAGE if isinstance(change, SuspendRequested) else {}
    before = training(**spec).take(change)
    job = training(**spec).take(change)
    held(job, problem=PROBLEM)
    followed = hold(before)
    assert followed is not None
    job.wait(timedelta(seconds=20))
    reset(job, to=before)
    request = hold(job)
    assert request is not None
    assert request.number > followed.number
    assert request == followed.replace(number=request.number, stores=job.state.checkpoints.requests if spec else 0)
    held(job, step=50)
    if spec:
        make_durable(job, step=50, answers=request.stores)
        assert job.state.phase is JobPhase.SUSPENDED
    else:
        job.those_that_leave_end()
        assert (job.generation, size(job)) == (2, 2)
    assert any("no step is lost" in one.text for one in job.incident.evidence)


def test_ranks_that_wait_until_they_are_ended_go_on_waiting_when_their_job_is_reset():
    before, job = (held(training().take(ScaleRequested(minimum=2, maximum=2))) for _ in range(2))
    request = hold(reset(job, to=before))
    assert request is not None
    assert request == hold(before)
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)


def test_ranks_whose_stored_step_a_reset_job_may_have_forgotten_store_another_one():
    before, job = (held(training(**STORAGE).take(SuspendRequested())) for _ in range(2))
    followed, request = hold(before), hold(reset(job, to=before))
    assert followed is not None
    assert request is not None
    assert (followed.stores, request.number > followed.number) == (1, True)
    assert request.stores == job.state.checkpoints.requests > 1
    held(job, step=42)
    make_durable(job, step=42, answers=request.stores)
    assert job.state.phase is JobPhase.SUSPENDED
    assert any("all ranks waited at it, and no step is lost" in one.text for one in job.incident.evidence)


@pytest.mark.parametrize("is_answered", [False, True], ids=["asked", "answered"])
def test_a_job_that_continues_as_new_while_its_ranks_wait_makes_the_change(is_answered: bool):
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    request = hold(job)
    if is_answered:
        held(job)
    job.whole = JobState.model_validate(job.whole.model_dump(mode="json"))
    assert hold(job) == request
    if not is_answered:
        held(job)
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
    assert any("no step is lost" in one.text for one in job.incident.evidence)
