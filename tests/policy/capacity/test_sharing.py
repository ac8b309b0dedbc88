"""Who gets which nodes of a cluster that elastic jobs share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.workflows.policy.capacity.sharing import SharingJob, SharingPolicy, share
from tests.policy.capacity.test_throughput import Law, measured, shared


def job(
    name: str, fewest: int = 1, most: int = 16, asked: int = 4, *, law: Law | None = None, **facts: Any
) -> SharingJob:
    throughput = None if law is None else measured(law, fewest, asked, most)
    return SharingJob(name=name, fewest=fewest, most=most, asked=asked, throughput=throughput, **facts)


PERFECT, HALF, WORSE = shared(1, 0), shared(0.5, 0.5), (lambda nodes: 0.1 * nodes)


@pytest.mark.parametrize(
    ("jobs", "nodes", "given"),
    [
        pytest.param([job("a", law=PERFECT)], 32, {"a": 16}, id="alone it has all that it can use"),
        pytest.param([job("a", law=WORSE)], 32, {"a": 1}, id="nodes that make it slower stay free"),
        pytest.param([job("a", law=PERFECT), job("b", law=PERFECT)], 16, {"a": 8, "b": 8}, id="two alike share"),
        pytest.param([job("a", law=PERFECT), job("b", law=HALF)], 16, {"a": 13, "b": 3}, id="what scales gets more"),
        pytest.param(
            [job("a", law=PERFECT, present=16), job("b", law=PERFECT)], 16, {"a": 9, "b": 7}, id="one comes to another"
        ),
        pytest.param([job("a", fewest=12, present=16), job("b")], 16, {"a": 12, "b": 4}, id="none has too few"),
        pytest.param([job("a", fewest=16, present=16), job("b")], 16, {"a": 16, "b": 0}, id="nor is it preempted"),
        pytest.param(
            [job("a", law=PERFECT, present=9), job("b", law=PERFECT, present=7)],
            16,
            {"a": 9, "b": 7},
            id="a little better is not worth a change",
        ),
        pytest.param(
            [job("a", law=PERFECT, priority=4), job("b", law=PERFECT)], 12, {"a": 8, "b": 4}, id="priority counts"
        ),
        pytest.param(
            [job("a", law=PERFECT, age=900, done=100), job("b", law=PERFECT, age=900, done=900)],
            12,
            {"a": 6, "b": 6},
            id="what was missed is made up for with the nodes that were asked for",
        ),
    ],
)
def test_nodes_go_where_they_add_most(jobs: list[SharingJob], nodes: int, given: dict[str, int]) -> None:
    assert share(jobs, nodes) == given


def test_a_large_job_that_waits_is_not_overtaken_and_one_that_never_fits_holds_up_none() -> None:
    jobs = [job("runs", present=4, fewest=4), job("large", fewest=14, age=100), job("late", age=1)]
    assert share(jobs, 16) == {"runs": 16, "large": 0, "late": 0}
    assert share([*jobs, job("never", fewest=21, most=30, age=1000)], 20)["large"] == 14


def test_the_policies_differ() -> None:
    jobs = [job("a", law=PERFECT, priority=2), job("b", law=PERFECT, age=1000, done=500)]
    assert share(jobs, 12, SharingPolicy.PRIORITY) == {"a": 11, "b": 1}
    assert share(jobs, 12, SharingPolicy.THROUGHPUT) == {"a": 7, "b": 5}
    fair = share(jobs, 12, SharingPolicy.FAIR)
    assert fair["b"] > fair["a"]


def test_a_job_that_has_less_than_without_sharing_has_what_it_asked_for_before_others_have_more() -> None:
    late = job("late", asked=8, law=HALF, present=2, age=900, done=600, waits=200)
    others = [job(f"{at}", law=PERFECT, present=7) for at in range(2)]
    assert share([late, *others], 16) == {"late": 8, "0": 4, "1": 4}
    # With a longer queue it would have waited itself.
    waited = replace(late, waits=300)
    assert share([waited, *others], 16)["late"] == 2
    # Of low priority it may take longer, and nodes that would not make it faster do not help it.
    assert share([replace(late, priority=0.5), *others], 16)["late"] == 2
    slow = replace(late, throughput=measured(lambda nodes: max(1 / nodes, 0.25), 1, 4, 8))
    assert share([slow, *others], 16)["late"] == 4


def test_a_late_job_that_waits_starts_with_what_it_asked_for_and_one_that_never_fits_holds_up_none() -> None:
    jobs = [job("runs", law=PERFECT, present=16), job("late", asked=12, age=600)]
    assert share(jobs, 16) == {"runs": 4, "late": 12}
    assert share([*jobs, job("never", fewest=20, most=30, age=9000)], 16) == {"runs": 4, "late": 12, "never": 0}


def test_small_changes_are_not_made_except_for_jobs_that_are_late() -> None:
    jobs = [job("a", most=40, asked=10, law=PERFECT, present=10), job("b", most=40, asked=10, law=PERFECT, present=10)]
    assert share(jobs, 21) == {"a": 10, "b": 10}
    assert share(jobs, 28) == {"a": 14, "b": 14}
    late = replace(jobs[0], asked=11, age=600, done=300)
    assert share([late, jobs[1]], 21)["a"] == 11


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 12), st.floats(0, 1), st.integers(0, 2), st.floats(0.1, 10)),
        max_size=8,
    ),
    st.integers(0, 64),
    st.sampled_from(SharingPolicy),
)
def test_no_node_is_given_twice_and_no_job_has_fewer_than_its_fewest(
    known: list[tuple[int, int, float, int, float]], free: int, policy: SharingPolicy
) -> None:
    jobs = [
        job(
            f"{at}",
            fewest,
            fewest + more,
            fewest + more // 2,
            law=shared(1 - exchange, exchange) if measurements else None,
            present=fewest + more // 3 if measurements == 2 else 0,
            priority=priority,
        )
        for at, (fewest, more, exchange, measurements, priority) in enumerate(known)
    ]
    nodes = sum(one.present for one in jobs) + free
    given_nodes = share(jobs, nodes, policy)
    assert sum(given_nodes.values()) <= nodes
    for one in jobs:
        has = given_nodes[one.name]
        assert (has == 0 and not one.present) or one.fewest <= has <= one.most
