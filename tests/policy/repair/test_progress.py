"""Progress is that of the training which goes on: a job that is at an older step again is not called stuck."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from perdure.contract import CheckpointRef, Progress, RankExit, Restore, RestoreSource
from perdure.contract.transitions import NodeRestoredCheckpoint
from perdure.workflows.policy.behavior import Behavior
from tests.policy.scenario import Scenario, counted, reported

STORAGE = {"storage": "file:///ckpt"}
LIMIT = 3


def continued(job: Scenario, step: int, **facts: object) -> Scenario:
    """The world continues from a saved step."""
    checkpoint = CheckpointRef(step=step, run="run", generation=1)
    restored = Restore(step=step, source=RestoreSource.MEMORY, checkpoint=checkpoint).replace(**facts)
    return job.transition(0, NodeRestoredCheckpoint, generation=job.generation, restored=restored)


def failed(job: Scenario, step: int) -> Scenario:
    """The script raises an error some days later, and the next world trains."""
    progress = reported(step).replace(generation=job.generation)
    return job.wait(timedelta(days=3)).rank_raised(1, f"ValueError: at {step}", progress=progress).steps()


def scenario() -> Scenario:
    return Scenario("2", checkpoint=STORAGE, retry={"no_progress_limit": LIMIT}).running()


def futile(job: Scenario) -> int:
    return job.state.memory.failures_without_progress


def test_a_job_that_is_at_an_older_step_again_makes_progress_by_the_steps_that_follow():
    job = failed(continued(scenario(), 380), 400)
    continued(job, 40)
    for step in range(50, 50 + 10 * (LIMIT + 3), 10):
        failed(job, step)
        assert (job.state.outcome, futile(job)) == (None, 0)
        continued(job, step - 2)


def test_a_job_that_went_back_with_its_first_restore_makes_progress_too():
    job = continued(failed(scenario(), 400), 40)
    for step in range(50, 50 + 10 * (LIMIT + 3), 10):
        failed(job, step)
        assert job.state.outcome is None
        continued(job, step - 2)
    assert futile(job) == 0


@pytest.mark.parametrize("every", [1, 10])
def test_a_script_that_always_fails_at_one_step_makes_none_however_often_it_comes_there(every: int):
    job = scenario()
    for _ in range(LIMIT + 2):
        assert job.state.outcome is None
        failed(job, 105)
        if job.state.outcome is None:
            continued(job, 105 - every)
    assert job.state.outcome is not None
    assert "retry.no_progress_limit" in job.state.outcome.reason


@pytest.mark.parametrize("source", list(RestoreSource))
def test_an_older_state_that_is_tried_for_its_failure_has_to_come_further(source: RestoreSource):
    job = continued(failed(scenario(), 105), 100)
    for step in (100, 100, 80, 100, 80):
        failed(job, 105)
        continued(job, step, source=source, distrusted=(100,) if step == 80 else ())
        if job.state.outcome is not None:
            break
    assert job.state.outcome is not None


def test_two_checkpointers_of_one_script_are_one_training():
    job = scenario()
    for _ in range(LIMIT + 2):
        if job.state.outcome is None:
            continued(continued(failed(job, 105), 100), 90)
    assert job.state.outcome is not None


def test_a_run_of_an_older_release_decides_as_before():
    job = scenario()
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    continued(failed(continued(job, 380), 400), 40)
    for step in (50, 60, 70, 80):
        continued(failed(job, step), step)
    assert job.state.outcome is not None


DAYS = timedelta(days=3)


def raised_in(job: Scenario, line: int, progress: Progress | None, after: timedelta) -> Scenario:
    """The script raises an error in this line."""
    error = RankExit(
        local_rank=0,
        global_rank=1,
        exit_code=1,
        error=f"ValueError: {line}",
        traceback=f'  File "/job/train.py", line {line}, in main\n',
    )
    progress = progress and progress.replace(generation=job.generation)
    job.runs() if progress is None else job.steps()
    return job.wait(after).take(job.failure(1, ranks=(error,), progress=progress)).wait(1)


@pytest.mark.parametrize(
    "progress",
    [lambda world: None, lambda world: counted(1_000_000 - world)],
    ids=["no step is seen", "a few fewer each time"],
)
def test_different_errors_of_worlds_that_lasted_are_no_series(progress: Callable[[int], Progress | None]):
    job = Scenario("2", retry={"no_progress_limit": LIMIT}).ready(0, 1)
    for world in range(3 * LIMIT):
        raised_in(job, 10 + world, progress(world), DAYS)
        assert job.state.outcome is None


@pytest.mark.parametrize(
    ("line", "after", "behavior"),
    [
        (lambda world: 10 + world % 2, timedelta(minutes=5), Behavior.RELEASE_0_4),
        (lambda world: 10 + world, DAYS, Behavior.RELEASE_0_3),
    ],
    ids=["worlds of minutes", "before"],
)
def test_errors_are_a_series_where_worlds_end_soon(line: Callable[[int], int], after: timedelta, behavior: Behavior):
    job = Scenario("2", retry={"no_progress_limit": LIMIT}).ready(0, 1)
    job.state = job.state.replace(behavior=behavior)
    worlds = 0
    while job.state.outcome is None:
        raised_in(job, line(worlds), None, after)
        worlds += 1
    assert worlds == LIMIT + 1


def test_the_same_error_ends_a_job_whose_worlds_last_days():
    job = Scenario("2", retry={"no_progress_limit": LIMIT}).ready(0, 1)
    for _ in range(2):
        raised_in(job, 10, None, DAYS)
    assert job.state.outcome is not None
    assert job.incident.rule.startswith("same-error/1")


def test_a_killed_rank_between_two_errors_begins_no_new_count():
    job = Scenario("2", retry={"no_progress_limit": LIMIT}).ready(0, 1)
    for _ in range(LIMIT):
        raised_in(job, 10, None, DAYS).rank_killed(0).wait(1)
        assert job.state.outcome is None
    raised_in(job, 10, None, DAYS)
    assert job.state.outcome is not None
