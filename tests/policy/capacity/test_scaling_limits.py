"""Extreme quantities: what a script, a user or a clock says leads to a decision, never to an error."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.cli.plan import sizes
from perdure.contract import Progress
from perdure.contract.transitions import NodePace
from perdure.spec.scaling import Scaling
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_throughput import shared
from tests.policy.scenario import START

LAW = shared(8, 0.5)
GOALS: tuple[dict[str, Any], ...] = (
    {"policy": "efficient", "min_efficiency": 1e-9},
    {"policy": "efficient", "min_efficiency": 1},
    {"policy": "deadline", "finish_by": START + timedelta(hours=5)},
    {"policy": "deadline", "finish_by": "0001-01-01T00:00:00Z"},
    {"policy": "deadline", "finish_by": "9999-12-31T23:59:59Z"},
    {"policy": "budget", "max_cost": 1e300, "price": 1e-300},
    {"policy": "budget", "max_cost": 1e-300, "price": 1e300},
    {"policy": "budget", "max_gpu_hours": 1e-300},
)


@given(st.sampled_from(GOALS), st.sampled_from([1, 10**4, 10**12, 10**15, 10**18, 10**25, 10**400]))
@settings(deadline=None, max_examples=12)
def test_any_number_of_steps_that_a_script_tells_leads_to_a_decision(goal: dict[str, Any], total: int) -> None:
    job = ScaledJob(law=LAW, total=total, **goal).settle()
    assert len(job.sizes) <= 4
    assert job.view.why
    assert sizes(job.view, job.status, also=(2000,), price=1e300)


@pytest.mark.parametrize("step", [0.0, -1.0, 1e300, float("inf"), float("nan")])
def test_a_speed_that_cannot_be_is_no_measurement(step: float) -> None:
    job = ScaledJob(law=LAW, total=8000)
    job.transition(0, NodePace, generation=job.generation, step=step)
    assert job.view.paces == ()
    assert job.settle().view.chosen is not None


def test_steps_that_jump_by_any_number_leave_the_pauses_and_the_rest_sane() -> None:
    job = ScaledJob(law=LAW, total=10**400, policy="deadline", finish_by=START + timedelta(hours=5))
    for step in (10**400, 5, 10**18, -(10**18)):
        progress = Progress(step=step, total_steps=10**400, last_step_at=job.now)
        job.transition(0, NodePace, generation=job.generation, step=1.0, progress=progress)
        job.pass_time(1)
    assert job.view.pauses >= 1
    assert job.view.why


def test_a_time_that_no_clock_reaches_is_refused_by_name() -> None:
    for field in ("settle", "patience"):
        with pytest.raises(ValueError, match=f"{field} is 9999999d; expected at most 365d"):
            Scaling.model_validate({field: "9999999d"})


@pytest.mark.parametrize("hours", [-1, 1])
@pytest.mark.parametrize("at", range(4))
def test_a_clock_that_jumps_by_an_hour_delays_decisions_by_no_more_and_undoes_none(hours: int, at: int) -> None:
    goal = {"policy": "budget", "max_cost": 64, "price": 2}
    job = ScaledJob(law=LAW, total=8000, room=9, patience="10m", **goal)
    spent = 0.0
    for turn in range(8):
        if turn == at:
            job.now += timedelta(hours=hours)
        job.measure().arrive().pass_time(14)
        assert job.state.stepping
        assert job.state.scaling.node_seconds >= spent
        spent = job.state.scaling.node_seconds
    tried = [resized.after for resized in job.view.resized if resized.is_try]
    assert len(tried) == len(set(tried)) <= 5
    assert job.state.nodes_max == job.sizes[-1], "nothing is awaited any more"
