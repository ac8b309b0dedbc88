"""Golden tests of the advice to the jobs of a cluster: who gives, who gets, and when nothing is said."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.contract import ClusterJob, ClusterSummary, JobPhase, Pace, SharingPolicy
from perdure.workflows.policy.capacity import advice
from perdure.workflows.policy.capacity.advice import Advice, SharingState, advise

NOW = datetime(2026, 11, 27, 8, tzinfo=UTC)
POOL = "cpu 8"


def job(name: str, *, nodes: int, requested: int | None = None, **fields: Any) -> ClusterJob:
    given: dict[str, Any] = {
        "namespace": "nlp",
        "job": name,
        "uid": f"uid-{name}",
        "role": "worker",
        "phase": JobPhase.RUNNING if nodes else JobPhase.STARTING,
        "nodes": nodes,
        "requested": nodes if requested is None else requested,
        "fewest": 1,
        "most": 4,
        "room": 0,
        "pool": POOL,
        "shares": True,
        "started_at": NOW - timedelta(minutes=5),
    }
    return ClusterJob(**(given | fields))


def seen(*jobs: ClusterJob, sharing: SharingPolicy | None = SharingPolicy.THROUGHPUT) -> ClusterSummary:
    return ClusterSummary(seen_at=NOW, jobs=jobs, sharing=sharing)


def said(given: tuple[Advice, ...]) -> dict[str, tuple[int, list[str], list[str], int]]:
    return {
        one.job: (
            one.message.nodes,
            [f"{e.nodes} {e.job}" for e in one.message.of],
            [f"{e.nodes} {e.job}" for e in one.message.to],
            one.message.free,
        )
        for one in given
    }


def test_a_job_that_waits_gets_nodes_of_one_that_has_many_and_both_are_told_of_each_other() -> None:
    _, told, _ = advise(SharingState(), seen(job("a", nodes=4), job("b", nodes=0, requested=4)), NOW)
    assert said(told) == {"a": (2, [], ["2 b"], 0), "b": (2, ["2 a"], [], 0)}


def test_free_nodes_are_given_before_those_of_others() -> None:
    _, told, _ = advise(SharingState(), seen(job("a", nodes=1, room=2), job("b", nodes=4, room=2)), NOW)
    assert said(told) == {"a": (3, [], [], 2)}


def test_a_job_of_another_namespace_is_not_named() -> None:
    other = job("b", nodes=0, requested=4, namespace="vision")
    _, told, _ = advise(SharingState(), seen(job("a", nodes=4), other), NOW)
    assert said(told)["a"] == (2, [], [f"2 {advice.ELSEWHERE}"], 0)


def test_no_job_has_fewer_than_its_fewest_nodes_or_more_than_its_most() -> None:
    # `a` can give only one, and `b` needs three to start: it waits on, and `a` keeps what it has.
    jobs = (job("a", nodes=4, fewest=3), job("b", nodes=0, requested=4, fewest=3))
    assert advise(SharingState(), seen(*jobs), NOW)[1] == ()
    assert advise(SharingState(), seen(job("a", nodes=4, room=9)), NOW)[1] == ()


def test_nodes_of_other_resources_are_not_shared() -> None:
    jobs = (job("a", nodes=4), job("b", nodes=0, requested=4, pool="nvidia.com/gpu 8"))
    assert advise(SharingState(), seen(*jobs), NOW)[1] == ()


def test_nothing_is_advised_where_a_site_does_not_share() -> None:
    jobs = (job("a", nodes=4), job("b", nodes=0, requested=4))
    assert advise(SharingState(), seen(*jobs, sharing=None), NOW)[1] == ()


def test_what_is_being_carried_out_is_not_said_again_and_what_is_not_followed_is() -> None:
    state, told, _ = advise(SharingState(), seen(job("a", nodes=4), job("b", nodes=0, requested=4)), NOW)
    assert len(told) == 2
    # `a` gives two once its checkpoint is made; `b` has not taken its advice.
    busy = seen(job("a", nodes=4, requested=2), job("b", nodes=0, requested=4))
    soon = NOW + timedelta(seconds=10)
    state, told, look = advise(state, busy, soon)
    assert (told, look) == ((), NOW + advice.APART)
    later = NOW + advice.AGAIN + timedelta(seconds=1)
    _, told, _ = advise(state, busy, later)
    assert said(told) == {"b": (2, ["2 a"], [], 0)}


def test_numbers_of_advice_grow() -> None:
    state, first, _ = advise(SharingState(), seen(job("a", nodes=4), job("b", nodes=0, requested=4)), NOW)
    other = seen(job("a", nodes=2), job("b", nodes=2), job("c", nodes=0, requested=4))
    _, second, _ = advise(state, other, NOW + timedelta(seconds=5))
    numbers = [one.message.number for one in (*first, *second)]
    assert numbers == sorted(set(numbers))
    assert "c" in said(second)


def test_a_cluster_that_is_reset_gives_advice_that_jobs_take() -> None:
    wants = seen(job("a", nodes=4), job("b", nodes=0, requested=4))
    _, before, _ = advise(SharingState(number=70), wants, NOW)
    _, after, _ = advise(SharingState(number=3), wants, NOW + timedelta(minutes=5))
    assert after
    assert min(one.message.number for one in after) > max(one.message.number for one in before)


def test_nodes_go_where_measurements_say_that_they_add_most() -> None:
    def paces(step: float, last: float) -> tuple[Pace, ...]:
        return Pace(nodes=1, step=step, generation=1), Pace(nodes=4, step=last, generation=2)

    scales = job("a", nodes=2, paces=paces(1.0, 0.25), global_batch=True)
    does_not = job("b", nodes=2, paces=paces(1.0, 0.95), global_batch=True)
    _, told, _ = advise(SharingState(), seen(scales, does_not), NOW)
    assert said(told) == {"a": (3, ["1 b"], [], 0), "b": (1, [], ["1 a"], 0)}


def test_a_clock_that_jumps_back_takes_no_work_away() -> None:
    # It counts on two nodes, in the middle of its range.
    state, _, _ = advise(SharingState(), seen(job("a", nodes=2)), NOW)
    state, _, _ = advise(state, seen(job("a", nodes=2)), NOW + timedelta(minutes=5))
    before = state.accounts["uid-a/worker"].done
    state, _, _ = advise(state, seen(job("a", nodes=2)), NOW - timedelta(days=1))
    assert state.accounts["uid-a/worker"].done == before == 300
    state, _, _ = advise(state, seen(job("a", nodes=2)), NOW + timedelta(days=365))
    assert state.accounts["uid-a/worker"].done == before + 600


def test_an_hour_that_no_one_has_seen_makes_no_job_late() -> None:
    jobs = (job("a", nodes=2, started_at=NOW), job("b", nodes=2, started_at=NOW))
    state, _, _ = advise(SharingState(), seen(*jobs), NOW)
    state, told, _ = advise(state, seen(*jobs), NOW + timedelta(hours=1))
    assert told == ()
    assert {account.done for account in state.accounts.values()} == {600}


def test_a_job_that_fell_behind_what_it_would_have_without_sharing_comes_first() -> None:
    jobs = (job("a", nodes=4, started_at=NOW), job("b", nodes=1, started_at=NOW, paces=_SLOW, global_batch=True))
    state, _, _ = advise(SharingState(), seen(*jobs), NOW)
    later = NOW + timedelta(minutes=10)
    _, told, _ = advise(state, seen(*jobs), later)
    # By its speed alone `b` would have one: a second node makes it only a fifth faster.
    assert said(told) == {"a": (3, [], ["1 b"], 0), "b": (2, ["1 a"], [], 0)}


def test_the_order_without_sharing_is_carried_and_ends_with_its_pool() -> None:
    state, _, _ = advise(SharingState(), seen(job("a", nodes=4)), NOW)
    carried = SharingState.model_validate_json(state.model_dump_json())
    assert carried == state
    assert [turn.name for turn in state.orders[POOL].turns] == ["uid-a/worker"]
    state, _, _ = advise(state, seen(), NOW + timedelta(minutes=1))
    assert state.orders == {}


_SLOW = (Pace(nodes=1, step=1.0, generation=1), Pace(nodes=4, step=0.75, generation=2))
