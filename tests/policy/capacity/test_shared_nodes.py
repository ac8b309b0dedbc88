"""What a job makes of advice: it follows within its range, says who gains and gives, and obeys its user."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import Exchange, IncidentView, NodesSuggested
from perdure.workflows.policy.facts.events import ScaleRequested, SuspendRequested
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_throughput import shared
from tests.policy.scenario import UID, Scenario


def sharing(nodes: str = "1:4", **scaling: Any) -> ScaledJob:
    return ScaledJob(nodes, law=shared(1.0, 0.1), policy="max", batch="global", share=True, **scaling)


def advice(nodes: int, number: int = 1, **fields: Any) -> NodesSuggested:
    return NodesSuggested(uid=UID, role="worker", nodes=nodes, number=number, **fields)


def entries(job: Scenario) -> list[IncidentView]:
    return [one for one in job.state.incidents if one.observation is not None and one.observation.shared]


def test_nodes_that_are_given_away_leave_and_come_back() -> None:
    job = sharing()
    assert job.sizes == [4]
    job.take(advice(2, to=(Exchange(job="other", nodes=2),)))
    job.arrive()
    job.take(advice(4, 2, of=(Exchange(job="other", nodes=1),), free=1))
    job.arrive()
    assert job.sizes == [4, 2, 4]
    gave, got = entries(job)
    assert gave.title == "the sharing of the cluster advises 2 nodes instead of 4: 2 to other"
    assert got.title == "the sharing of the cluster advises 4 nodes instead of 2: 1 from other, 1 that are free"
    shrank = next(one for one in job.state.incidents if one.observation is None)
    assert "2 to other" in shrank.title
    assert "user" not in shrank.rule


def test_advice_is_kept_to_what_a_user_allows() -> None:
    job = sharing("2:6")
    job.take(advice(1))
    assert job.state.nodes_max == 6
    job.take(advice(99, 2)).take(advice(3, 3))
    job.arrive()
    assert job.state.nodes_max == 3
    job.allow(2, 2)
    assert (job.state.nodes_max, job.view.advised) == (2, None)
    job.take(advice(6, 4))
    assert job.state.nodes_max == 2
    job.allow(2, 4).take(advice(3, 5))
    assert (job.state.nodes_max, job.view.largest) == (3, 4)


def test_advice_is_given_in_whole_units() -> None:
    job = sharing("2:8", node_group=2)
    job.take(advice(5))
    assert job.state.nodes_max == 4


def test_old_advice_and_advice_twice_change_nothing() -> None:
    job = sharing().take(advice(2, 7))
    assert job.state.nodes_max == 2
    job.take(advice(4, 6)).take(advice(4, 7))
    assert job.state.nodes_max == 2
    assert len(entries(job)) == 1


def test_a_job_that_does_not_share_or_is_suspended_takes_no_advice() -> None:
    alone = ScaledJob("1:4", law=shared(1.0, 0.1), policy="manual")
    alone.take(advice(2))
    assert alone.state.nodes_max == 4
    job = sharing().take(SuspendRequested())
    job.take(advice(2))
    assert not entries(job)


def test_a_job_whose_cluster_says_nothing_for_hours_trains_on_and_replaces_its_nodes() -> None:
    job = sharing()
    job.take(advice(2, to=(Exchange(job="other", nodes=2),)))
    job.arrive()
    assert job.sizes == [4, 2]
    for _ in range(12):
        job.pass_time(30)
    job.lost(1)
    job.arrive()
    assert (job.sizes, job.state.nodes_max, job.state.outcome) == ([4, 2, 2], 2, None)
    assert len(entries(job)) == 1


def test_its_speed_is_measured_and_it_chooses_nothing_by_itself() -> None:
    job = sharing()
    job.settle()
    assert [pace.nodes for pace in job.view.paces] == [4]
    assert job.sizes == [4]
    assert job.view.shares
    assert job.view.why == "the sharing of the cluster has advised nothing"


@given(st.lists(st.one_of(st.integers(0, 12), st.tuples(st.integers(1, 6), st.integers(0, 6))), max_size=12))
def test_no_advice_leads_out_of_what_a_user_allows(said: list[int | tuple[int, int]]) -> None:
    job = sharing("2:6")
    least, most = 2, 6
    for number, one in enumerate(said, start=1):
        if isinstance(one, int):
            job.take(advice(one, number))
        else:
            least, most = one[0], sum(one)
            job.take(ScaleRequested(minimum=least, maximum=most))
        assert least <= job.state.nodes_max <= most
