"""Which ranks are found to be slow by comparison with the others, and which are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.explain import explanation
from perdure.contract import RankStepTimes
from perdure.contract.transitions import NodeStepTimes
from perdure.workflows.policy.diagnosis.stragglers import describe, find
from perdure.workflows.policy.timers import next_deadline
from tests.policy.scenario import Scenario


def together(*computes: float, transfer: float = 0.02, rest: float = 0.01) -> list[RankStepTimes]:
    """Ranks that compute for these seconds and then wait for the slowest."""
    slowest = max(computes)
    return [
        RankStepTimes(rank=rank, compute=compute, wait=slowest - compute + transfer, rest=rest)
        for rank, compute in enumerate(computes)
    ]


# What eight ranks, or fewer, compute in a step, in milliseconds, and which of them are slow.
CASES: dict[str, tuple[Sequence[float], Sequence[int]]] = {
    "one at 0.8x among 8": ([200, 204, 198, 250, 201, 199, 203, 200], [3]),
    "one at 0.5x": ([200, 204, 198, 203, 201, 199, 400, 200], [6]),
    "two of 8": ([200, 260, 198, 203, 201, 199, 280, 200], [6, 1]),
    "the slow one of three": ([200, 202, 260], [2]),
    "all alike": ([200, 204, 198, 203, 201, 199, 203, 200], []),
    "all slow down together": ([500, 504, 498, 503, 501, 499, 503, 500], []),
    "a little slower": ([200, 204, 198, 203, 201, 199, 215, 200], []),
    "uneven batches": ([150, 260, 180, 220, 310, 170, 240, 200], []),
    "half of them have other work": ([200, 200, 200, 200, 300, 300, 300, 300], []),
    "three of 8 do": ([200, 200, 200, 200, 200, 300, 310, 305], []),
    "two ranks": ([200, 300], []),
    "one rank": ([200], []),
    "one is faster": ([200, 204, 198, 120, 201, 199, 203, 200], []),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_slow(name: str):
    computes, slow = CASES[name]
    assert [one.rank for one in find(together(*(compute / 1e3 for compute in computes)))] == list(slow)


@pytest.mark.parametrize(
    ("computes", "per_node", "slow"),
    [
        ([200, 202, 300, 301], 2, [3, 2]),
        ([300, 301, 302, 303, 200, 201, 199, 200], 4, [3, 2, 1, 0]),
        ([200, 200, 300, 300, 300, 300], 2, []),
        ([200, 300, 300, 200], 2, []),
        ([200, 200, 200, 300], 2, [3]),
    ],
)
def test_a_slow_node_of_several_ranks_is_named(computes: list[float], per_node: int, slow: list[int]):
    nodes = {rank: rank // per_node for rank in range(len(computes))}
    assert [one.rank for one in find(together(*(compute / 1e3 for compute in computes)), nodes)] == slow


def test_why_the_clocks_of_a_slow_rank_are_reduced_is_named_unless_they_are_for_most():
    ranks = together(0.2, 0.2, 0.2, 0.3)
    [found] = find([*ranks[:3], ranks[3].replace(slowed="thermal")])
    assert found.slowed == "thermal"
    assert describe(found).endswith("; the clocks of its GPU are reduced (thermal), and those of most others are not")
    [found] = find([one.replace(slowed="power") for one in ranks])
    assert (found.slowed, "clocks" in describe(found)) == ("", False)


def test_who_computes_longer_while_nobody_waits_is_not_slow():
    ranks = together(0.2, 0.2, 0.2, 0.3)
    assert find([one.replace(wait=0.02) for one in ranks]) == []


def test_what_a_slow_rank_costs_is_told():
    [found] = find(together(0.2, 0.2, 0.2, 0.25, transfer=0.0, rest=0.0))
    assert (found.compute, found.usual, round(found.lost, 6)) == (0.25, 0.2, 0.2)


@given(st.lists(st.floats(0, 10), max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_few_are_named_and_only_those_that_compute_longest(computes: list[float], transfer: float, rest: float):
    ranks = together(*computes, transfer=transfer, rest=rest) if computes else []
    found = find(ranks)
    assert len(found) <= max(1, len(ranks) / 4)
    named = {one.rank for one in found}
    others = [one.compute for one in ranks if one.rank not in named]
    assert all(one.compute > max(others) for one in found if one.rank == found[0].rank and others)


@given(st.lists(st.floats(0.1, 0.105), min_size=3, max_size=20))
def test_none_is_named_where_all_are_nearly_alike(computes: list[float]):
    assert find(together(*computes)) == []


@given(st.lists(st.floats(0.1, 0.102), min_size=7, max_size=30), st.floats(1.2, 10))
def test_a_rank_at_five_sixths_is_named(computes: list[float], factor: float):
    assert [one.rank for one in find(together(*computes, 0.102 * factor, transfer=0.0, rest=0.0))] == [len(computes)]


def report(job: Scenario, *computes: float, generation: int = 1) -> Scenario:
    """One rank for each node."""
    for times in together(*computes):
        job.transition(times.rank, NodeStepTimes, generation=generation, ranks=(times,))
    return job


def test_a_slow_rank_is_one_entry_of_its_world_and_nothing_is_interrupted():
    job = report(Scenario("4").running(), 0.2, 0.2, 0.25, 0.2)
    report(job.wait(60), 0.2, 0.2, 0.26, 0.2).wait(60)
    assert (job.generation, job.state.interruption, job.state.restart_count) == (1, None, 0)
    [entry] = job.state.incidents
    assert entry.title == "rank 2 is slow, and the others wait for it; training continued"
    assert entry.observation is not None
    assert [(one.node, one.rank) for one in entry.observation.stragglers] == [(2, 2)]
    told = explanation(entry, job="llama", flag="").plain
    assert "computes for 250 ms a step and the others for 200 ms, 1.25 times as long" in told
    assert "they wait for it, 11 min of each hour" in told
    assert "NOT   replace the node: a rank that is given longer samples than the others looks the same" in told
    assert "perdure restart llama --node 2" in told
    assert next_deadline(job.whole, job.job, job.now) is None


def test_another_slow_rank_is_added_to_the_entry():
    job = report(Scenario("8").running(), *[0.2] * 7, 0.3)
    report(job, *[0.2] * 6, 0.3, 0.3)
    [entry] = job.state.incidents
    assert entry.observation is not None
    assert [one.rank for one in entry.observation.stragglers] == [7, 6]


def test_the_next_world_has_an_entry_of_its_own():
    job = report(Scenario("4").running(), 0.2, 0.2, 0.25, 0.2).rank_killed(0).steps()
    report(job, 0.2, 0.2, 0.25, 0.2, generation=2)
    assert [one.observation is not None for one in job.state.incidents] == [True, False, True]


def test_ranks_are_compared_when_all_nodes_of_the_world_have_reported():
    job = Scenario("4").running()
    slow, *others = together(0.3, 0.2, 0.2, 0.2)
    job.transition(0, NodeStepTimes, generation=1, ranks=(slow,))
    for times in others:
        assert not job.state.incidents
        job.transition(times.rank, NodeStepTimes, generation=1, ranks=(times,))
    assert job.incident.title.startswith("rank 0 is slow")


def test_a_node_speaks_for_its_own_ranks_and_world_only():
    job = Scenario("4").running()
    for rank in range(4):
        job.transition(rank, NodeStepTimes, generation=1, ranks=tuple(together(0.2, 0.2, 0.2, 0.3)[:3]))
    assert {one.rank: [times.rank for times in one.step_times] for one in job.state.members} == {
        0: [0],
        1: [1],
        2: [2],
        3: [],
    }
    job.rank_killed(0).steps()
    report(job, 0.2, 0.2, 0.3, 0.2, generation=1)
    assert [one.observation for one in job.state.incidents] == [None]
