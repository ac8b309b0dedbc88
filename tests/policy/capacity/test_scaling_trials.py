"""What misleads a scaler: slow nodes, laws with a valley, requests from several sides, and jobs that want one node."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.contract import NodesSuggested, RankStepTimes
from perdure.contract.transitions import NodeStepTimes
from perdure.workflows.policy.facts.events import ScaleRequested
from tests.policy.capacity.test_new_goal import change
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_throughput import Law, shared
from tests.policy.scenario import UID


def times(job: ScaledJob, slow: int | None) -> None:
    """The nodes of the world tell how their steps split; one of them computes for half as long again."""
    assert job.state.world is not None
    for rank, member in job.state.world.members.items():
        compute, wait = (3.0, 0.2) if rank == slow else (2.0, 0.2 if slow is None else 1.2)
        split = RankStepTimes(rank=member.base_rank, compute=compute, wait=wait, rest=0.1)
        job.transition(rank, NodeStepTimes, generation=job.generation, ranks=(split,))


@pytest.mark.parametrize("found_first", [True, False])
def test_a_slow_node_while_a_number_is_measured_does_not_condemn_that_number(found_first: bool) -> None:
    law = shared(8, 0.25)
    fair = ScaledJob("2:16", law=law).settle().sizes
    assert fair == [16, 6, 13]
    job = ScaledJob("2:16", law=law).measure().arrive().measure().arrive()
    if found_first:
        times(job, slow=3)
        job.measure(1.5).arrive()
    else:
        # The speed of the world is told before the split of its steps.
        job.measure(1.5).arrive()
        assert "13 nodes are slower than others let expect" in job.view.why
        times(job, slow=3)
    assert [pace.nodes for pace in job.view.paces] == [6, 16]
    assert job.sizes == fair
    times(job, slow=None)
    job.settle()
    assert (job.sizes[-1], len(job.sizes)) == (13, 3)
    assert job.view.chosen == 13


def test_a_world_that_is_slow_without_a_slow_rank_is_believed_after_one_more_measurement() -> None:
    job = ScaledJob("2:16", law=shared(8, 0.25)).measure().arrive().measure().arrive()
    job.measure(1.5).arrive()
    assert job.sizes[-1] == 13
    job.wait(31)
    job.arrive()
    assert job.settle().sizes[-1] < 13
    assert len(job.sizes) <= 6


@pytest.mark.parametrize(
    ("law", "best"),
    [
        pytest.param(lambda nodes: 1 + 0.05 * nodes, 2, id="each node makes it slower"),
        pytest.param(lambda nodes: 8 / nodes + 0.1 * nodes, 9, id="steps are shortest with 9"),
    ],
)
def test_throughput_that_falls_with_more_nodes_ends_with_no_more_than_the_fastest_number(law: Law, best: int) -> None:
    job = ScaledJob(law=law, min_efficiency=0.01)
    for _ in range(12):
        job.measure().arrive().wait(31)
        job.arrive()
    assert law(job.sizes[-1]) <= 1.05 * law(best)
    tried = [resized.after for resized in job.view.resized if resized.is_try]
    assert len(tried) == len(set(tried)) <= 5


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("user"), st.integers(1, 8), st.integers(0, 8)),
            st.tuples(st.just("cluster"), st.integers(0, 20), st.just(0)),
            st.tuples(st.just("goal"), st.sampled_from([0.1, 0.7, 1.0]), st.booleans()),
            st.tuples(st.just("measured"), st.sampled_from([0.8, 1.0, 1.4]), st.just(0)),
        ),
        max_size=10,
    )
)
@settings(deadline=None, max_examples=12)
def test_with_requests_from_all_sides_the_number_stays_in_what_the_newest_user_allows(
    requests: list[tuple[str, float, int]],
) -> None:
    job = ScaledJob("2:16", law=shared(8, 0.25), total=10**6)
    least, most = 2, 16
    for number, (who, value, more) in enumerate(requests, start=1):
        if who == "user":
            least, most = int(value), int(value) + more
            job.take(ScaleRequested(minimum=least, maximum=most))
        elif who == "cluster":
            job.take(NodesSuggested(uid=UID, role="worker", nodes=int(value), number=number))
        elif who == "goal":
            change(job, policy="efficient" if more else "max", min_efficiency=value)
        elif job.state.world is not None and job.state.stepping:
            job.measure(value).arrive()
        assert job.state.nodes_min == least
        assert job.state.nodes_max <= max(most, job.state.world.nodes if job.state.world else 0)
        job.arrive()
    job.pass_time(1)
    world = job.state.world
    assert world is not None
    assert least <= world.nodes <= most


def test_two_jobs_that_want_the_same_node_leave_it_to_one_and_the_other_waits_only_for_its_patience() -> None:
    law = shared(8, 0.25)
    first, second = (ScaledJob("2:16", law=law, room=6, patience="10m").settle() for _ in range(2))
    assert first.state.nodes_max == second.state.nodes_max == 13
    first.room = 13
    first.arrive().settle()
    for job in (first, second):
        job.pass_time(11)
    assert (first.sizes[-1], second.sizes[-1]) == (13, 6)
    assert (first.state.nodes_max, second.state.nodes_max) == (13, 6)
    # The first one ends, and its nodes become free.
    second.room = 13
    second.pass_time(20)
    second.settle()
    assert second.sizes[-1] == 13
