"""A goal that a user changes while the job runs: what was measured counts, and the job chooses by it at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.client.scaling import new_goal
from perdure.spec.accepted import read_accepted
from perdure.spec.running import scaling_mapping, with_scaling
from perdure.spec.scaling import Scaling
from perdure.workflows.policy.capacity.new_goal import difference
from perdure.workflows.policy.facts.events import ScalingChanged
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_throughput import shared

LAW = shared(8, 0.5)
"""2.4 h for 8,000 steps with 16 nodes, 5.6 h with 4."""


def change(job: ScaledJob, reason: str = "", **goal: Any) -> ScaledJob:
    """A user changes these fields of `scaling`, as the job takes it."""
    before = job.job.roles["worker"].scaling
    given = {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in goal.items()}
    job.job = read_accepted(with_scaling(job.job, "worker", new_goal(scaling_mapping(before), given)))
    job.take(ScalingChanged(change=difference(before, job.job.roles["worker"].scaling), reason=reason))
    return job.arrive()


def test_another_goal_is_followed_at_once_by_what_was_measured() -> None:
    job = ScaledJob(law=LAW, total=8000).settle()
    assert job.sizes == [16, 6]
    change(job, finish_by=job.now + timedelta(hours=10))
    assert job.sizes == [16, 6, 3]
    assert job.view.policy == "deadline"
    job.settle()
    change(job, finish_by=job.now + timedelta(hours=3))
    job.settle()
    assert job.sizes[-1] in range(11, 14)
    assert not job.view.problem


def test_explain_says_who_changed_the_goal_and_why() -> None:
    job = ScaledJob(law=LAW, total=8000).settle()
    change(job, "the review is on Monday", policy="budget", max_gpu_hours=200)
    told = next(one for one in job.state.incidents if one.observation is not None and one.observation.new_goal)
    assert told.title == (
        "a user has changed scaling: the review is on Monday: policy budget instead of efficient, max_gpu_hours 200 "
        "instead of none"
    )
    text = explanation(told, job="job", flag="").plain
    assert "nothing was interrupted" in text
    assert "with the speeds that were measured before" in text


def test_a_goal_that_cannot_be_reached_is_told_anew_for_each_goal() -> None:
    job = ScaledJob(law=LAW, total=8000, policy="deadline", finish_by=ScaledJob(law=LAW).now + timedelta(hours=1))
    job.settle()
    assert job.view.problem
    change(job, finish_by=job.now + timedelta(hours=1.5))
    job.settle()
    problems = [one.title for one in job.state.incidents if one.observation is not None and one.observation.missed_goal]
    assert len(problems) == len(set(problems)) == 2
    change(job, finish_by=job.now + timedelta(hours=40))
    job.settle()
    assert not job.view.problem
    assert job.sizes[-1] == 2


def test_max_takes_all_nodes_again_and_manual_keeps_the_present_ones() -> None:
    job = ScaledJob(law=LAW).settle()
    change(job, policy="manual")
    assert job.settle().sizes == [16, 6]
    change(job, policy="max")
    assert job.sizes == [16, 6, 16]
    assert job.state.scaling.largest is None


def test_a_job_of_all_nodes_has_been_measured_when_it_gets_a_goal() -> None:
    job = ScaledJob(law=LAW, policy="max", total=8000).measure()
    change(job, policy="efficient")
    assert job.sizes == [16, 6]
    assert job.settle().sizes == [16, 6]


def test_the_same_goal_again_changes_nothing() -> None:
    job = ScaledJob(law=LAW).settle()
    known = job.job.roles["worker"].scaling
    assert difference(known, Scaling(**scaling_mapping(known))) == ""


def test_what_a_user_allows_holds_for_the_new_goal() -> None:
    job = ScaledJob(law=LAW, total=8000).settle()
    job.allow(12, 14).settle()
    change(job, finish_by=job.now + timedelta(hours=40))
    assert job.settle().sizes[-1] == 12
    change(job, policy="max")
    assert job.sizes[-1] == 14


def test_a_change_waits_while_a_user_looks_at_the_job_and_while_it_is_suspended() -> None:
    job = ScaledJob(law=LAW).settle()
    job.take(_pause(job))
    change(job, finish_by=job.now + timedelta(hours=40), steps=8000)
    assert job.sizes == [16, 6]


def _pause(job: ScaledJob) -> Any:
    from perdure.workflows.policy.facts.events import RepairsPaused

    return RepairsPaused(until=job.now + timedelta(hours=1))


@pytest.mark.parametrize(
    ("present", "given", "whole"),
    [
        ({}, {"finish_by": "T"}, {"policy": "deadline", "finish_by": "T"}),
        (
            {"policy": "deadline", "finish_by": "T", "batch": "global"},
            {"policy": "max"},
            {"policy": "max", "batch": "global"},
        ),
        (
            {"policy": "budget", "max_cost": 5.0, "price": 1.0},
            {"max_gpu_hours": 3.0},
            {"policy": "budget", "price": 1.0, "max_gpu_hours": 3.0},
        ),
        (
            {"policy": "budget", "max_gpu_hours": 5.0},
            {"price": 2.0},
            {"policy": "budget", "max_gpu_hours": 5.0, "price": 2.0},
        ),
        ({"share": True, "priority": 2.0}, {"policy": "efficient"}, {"policy": "efficient"}),
        ({}, {"min_efficiency": 0.5}, {"policy": "efficient", "min_efficiency": 0.5}),
        (
            {"policy": "deadline", "finish_by": "T"},
            {"min_efficiency": 0.5},
            {"policy": "deadline", "finish_by": "T", "min_efficiency": 0.5},
        ),
    ],
)
def test_a_goal_means_its_policy_and_replaces_those_of_others(
    present: dict[str, Any], given: dict[str, Any], whole: dict[str, Any]
) -> None:
    assert new_goal(present, given | {"policy": given.get("policy")}) == whole
