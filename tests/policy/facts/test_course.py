"""Tests that a job keeps the course of its training through failures, whichever node reports them."""

from __future__ import annotations

from perdure.contract import CourseSample
from perdure.contract.courses import MOST_SAMPLES
from tests.policy.scenario import Scenario, reported


def course(*seconds: int) -> tuple[CourseSample, ...]:
    return tuple(CourseSample(second, second) for second in seconds)


def test_the_course_outlives_failures_of_other_nodes_and_replaced_agents() -> None:
    job = Scenario("2").running()
    first = reported(30).replace(course=course(10, 20, 30))
    job.rank_killed(0, progress=first).steps()
    job.rank_killed(1, progress=reported(40)).steps()
    assert job.state.progress is not None
    assert job.state.progress.step == 40
    assert job.state.progress.course == first.course
    job.rank_killed(0, progress=reported(60).replace(course=course(45, 60)))
    assert job.state.progress.course == course(10, 20, 30, 45, 60)


def test_a_course_stays_small() -> None:
    job = Scenario("2").running()
    job.rank_killed(0, progress=reported(500).replace(course=course(*range(100)))).steps()
    job.rank_killed(0, progress=reported(900).replace(course=course(*range(200, 300))))
    assert job.state.progress is not None
    kept = job.state.progress.course
    assert MOST_SAMPLES / 2 <= len(kept) <= MOST_SAMPLES
    assert kept[-1].at == 299
