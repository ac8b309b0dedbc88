"""What each policy of `scaling` chooses, and says, of the same measurements."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.spec.scaling import BatchSize, Scaling
from perdure.workflows.policy.capacity.goals import Choice, Outlook, choose, meets
from tests.policy.capacity.test_throughput import measured, shared

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SIZES = range(2, 17)
LAW = shared(8, 0.5)
"""Seconds of a step: 4.5 with 2 nodes, 1.5 with 8, 1 with 16."""
THROUGHPUT = measured(LAW, 2, 8, 16)


def outlook(present: int = 8, steps: float | None = 7200, **facts: Any) -> Outlook:
    return Outlook(now=NOW, present=present, steps=steps, **facts)


def choice(present: int = 8, *, sizes: range = SIZES, steps: float | None = 7200, **scaling: Any) -> Choice:
    facts = {name: scaling.pop(name) for name in ("pauses", "change", "node_hours", "ranks") if name in scaling}
    known = Scaling(batch=scaling.pop("batch", "global"), **scaling)
    return choose(known, THROUGHPUT, sizes, outlook(present, steps, **facts))


def by(hours: float) -> dict[str, Any]:
    return {"policy": "deadline", "finish_by": NOW + timedelta(hours=hours)}


@pytest.mark.parametrize(
    ("hours", "present", "chosen"),
    [
        # 3 h with 8 nodes, 4.2 with 5, 2.6 with 10, 2 with 16.
        pytest.param(5, 16, 5, id="the fewest that finish"),
        pytest.param(4.3, 16, 6, id="what finishes just so is not changed to"),
        pytest.param(4.3, 5, 5, id="and is kept"),
        pytest.param(4.1, 5, 6, id="unless it is late"),
        pytest.param(100, 16, 2, id="much time needs few"),
        pytest.param(2.22, 2, 16, id="little needs all"),
    ],
)
def test_the_fewest_nodes_that_finish_in_time_are_chosen(hours: float, present: int, chosen: int) -> None:
    found = choice(present, **by(hours))
    assert (found.nodes, found.problem) == (chosen, "")
    assert f"{chosen} nodes finish at 2026-01-0" in found.why


def test_a_deadline_that_cannot_be_made_is_told_with_what_could() -> None:
    found = choice(16, **by(1.5))
    assert found.nodes == 16
    assert found.problem == (
        "no number of nodes surely finishes by 2026-01-01 01:30 UTC: 16, the fastest, finish at 2026-01-01 02:00 UTC; "
        "45 nodes could make it, by what was measured, and 16 are allowed"
    )
    # Half a second of a step is not divided by the nodes.
    assert "finish_by 2026-01-01 02:12 UTC could be made" in choice(16, **by(0.9)).problem
    assert "finish_by" in choice(16, **by(-5)).problem


def test_pauses_and_the_change_count() -> None:
    assert choice(16, pauses=1.2, **by(5)).nodes == 6
    assert choice(16, change=timedelta(minutes=30), **by(5)).nodes == 6


@pytest.mark.parametrize(
    ("hours", "present", "chosen"),
    [
        # Node-hours: 18 with 2 nodes, 24 with 8, 28 with 12, 32 with 16.
        pytest.param(100, 2, 16, id="much money buys all"),
        pytest.param(28, 2, 9, id="the fastest that can be paid"),
        pytest.param(24.5, 8, 8, id="the present one is kept though little is to spare"),
        pytest.param(23, 8, 4, id="unless it costs too much"),
    ],
)
def test_the_number_that_finishes_soonest_within_the_budget_is_chosen(hours: float, present: int, chosen: int) -> None:
    found = choice(present, policy="budget", max_cost=2 * hours, price=2)
    assert (found.nodes, found.problem) == (chosen, "")
    assert f"max_cost is {2 * hours:,.2f}" in found.why
    in_hours_of_ranks = choice(present, policy="budget", max_gpu_hours=8 * hours, ranks=8)
    assert in_hours_of_ranks.nodes == chosen


def test_what_was_spent_counts() -> None:
    assert choice(2, policy="budget", max_gpu_hours=128, node_hours=100).nodes == 9


def test_a_budget_that_cannot_be_kept_is_told_and_the_cheapest_number_is_chosen() -> None:
    found = choice(8, policy="budget", max_cost=10, price=1)
    assert found.nodes == 2
    assert found.problem == (
        "no number of nodes surely stays within max_cost 10.00: 2, the cheapest, take 18.00 in all; the training goes "
        "on"
    )
    assert choice(8, policy="budget", max_gpu_hours=10, node_hours=11).nodes == 2


@pytest.mark.parametrize("goal", [by(5), {"policy": "budget", "max_gpu_hours": 5}])
def test_without_a_number_of_steps_nothing_is_chosen_and_the_remedy_told(goal: dict[str, Any]) -> None:
    found = choice(steps=None, **goal)
    assert found.nodes is None
    assert "give scaling.steps, or have the script tell it with perdure_training.report(total=...)" in found.problem


@pytest.mark.parametrize("goal", [by(5), {"policy": "budget", "max_gpu_hours": 5}])
def test_one_measurement_is_too_little(goal: dict[str, Any]) -> None:
    found = choose(Scaling(batch=BatchSize.GLOBAL, **goal), measured(LAW, 8), SIZES, outlook())
    assert found.nodes is None
    assert "too little is measured" in found.why


def test_manual_chooses_nothing() -> None:
    assert choice(policy="manual").nodes is None


def test_with_a_batch_for_each_rank_more_nodes_need_fewer_steps() -> None:
    def chosen(present: int) -> int | None:
        throughput = measured(lambda nodes: 1 + 0.01 * nodes, 2, 16, global_batch=False)
        return choose(Scaling(**by(1.5)), throughput, SIZES, outlook(present, steps=7200 / present)).nodes

    # 7,200 steps of one node take 2 h and more with one, less than 1.1 h with two.
    assert chosen(2) == chosen(16) == 2


def test_plan_knows_which_numbers_reach_the_goal() -> None:
    known = Scaling(batch=BatchSize.GLOBAL, **by(3.01))
    assert [nodes for nodes in SIZES if meets(known, THROUGHPUT, outlook(), nodes)] == list(range(8, 17))
    assert meets(Scaling(), THROUGHPUT, outlook(), 8) is None


@given(st.floats(2.5, 20), st.integers(2, 16), st.lists(st.floats(0.99, 1.01), min_size=40, max_size=40), st.booleans())
def test_what_is_to_spare_is_used_up_step_by_step_and_never_taken_back(
    hours: float, present: int, noise: list[float], in_time: bool
) -> None:
    goal = by(hours) if in_time else {"policy": "budget", "max_gpu_hours": 19 + hours}
    known = Scaling(batch=BatchSize.GLOBAL, **goal)
    now, left, node_hours, sizes = NOW, 7200.0, 0.0, list[int]()
    for part in noise:
        found = choose(known, THROUGHPUT, SIZES, Outlook(now=now, present=present, steps=left, node_hours=node_hours))
        assert found.nodes is not None
        assert not found.problem
        present = found.nodes
        sizes.append(present)
        seconds = 7200 / len(noise) * LAW(present) * part
        now, left, node_hours = (
            now + timedelta(seconds=seconds),
            left - 7200 / len(noise),
            node_hours + present * seconds / 3600,
        )
    assert sizes == sorted(sizes, reverse=in_time)
    assert len(set(sizes)) <= 6
    assert now <= NOW + timedelta(hours=hours) if in_time else node_hours <= 19 + hours
