"""What jobs would have without sharing: what they ask for, in the order of submission."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from perdure.workflows.policy.capacity import first_come
from perdure.workflows.policy.capacity.first_come import Order, follow

NOW = datetime(2026, 11, 27, 8, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


def starts(order: Order) -> dict[str, float | None]:
    """Minutes until each job would have started."""
    return {
        turn.name: None if turn.started_at is None else (turn.started_at - NOW) / timedelta(minutes=1)
        for turn in order.turns
    }


def test_jobs_start_in_turn_and_one_without_room_holds_up_those_after_it() -> None:
    order = follow(Order(), [("a", 3), ("b", 2), ("c", 1)], {}, 4, NOW)
    assert starts(order) == {"a": 0, "b": None, "c": None}
    assert order.waits(NOW, "b", at(7)) == timedelta(minutes=7)
    assert order.waits(NOW, "a", at(7)) == timedelta()


def test_a_job_that_ended_early_keeps_its_nodes_for_as_long_as_it_would_have_trained() -> None:
    order = follow(Order(), [("a", 4), ("b", 4)], {}, 4, NOW)
    # With more nodes it has ended after 5 minutes, what would have taken it 20.
    order = follow(order, [("b", 4)], {"a": timedelta(minutes=20)}, 4, at(5))
    assert starts(order) == {"a": 0, "b": None}
    order = follow(order, [("b", 4)], {}, 4, at(30))
    assert starts(order) == {"b": 20}
    assert order.waits(NOW, "b", at(30)) == timedelta(minutes=20)


def test_a_job_that_is_late_keeps_its_nodes_until_it_ends() -> None:
    order = follow(Order(), [("a", 4), ("b", 4)], {}, 4, NOW)
    order = follow(order, [("a", 4), ("b", 4)], {}, 4, at(60))
    assert starts(order) == {"a": 0, "b": None}
    # It would have taken 40 minutes, and what was not known then cannot begin before the last look.
    assert starts(follow(order, [("b", 4)], {"a": timedelta(minutes=40)}, 4, at(61))) == {"b": 60}


def test_a_job_that_asks_for_more_than_there_is_starts_with_all_and_machines_may_vanish() -> None:
    order = follow(Order(), [("a", 9)], {}, 4, NOW)
    assert starts(order) == {"a": 0}
    assert starts(follow(order, [("a", 9), ("b", 1)], {}, 2, at(1))) == {"a": 0, "b": None}


def test_a_job_that_comes_back_has_its_turn_again() -> None:
    order = follow(Order(), [("a", 4)], {}, 4, NOW)
    order = follow(order, [], {"a": timedelta(hours=1)}, 4, at(1))
    order = follow(order, [("a", 4)], {}, 4, at(2))
    assert starts(order) == {"a": 0}
    assert order.turns[0].work is None


def test_ended_jobs_are_forgotten_from_the_oldest_if_there_are_too_many() -> None:
    names = [f"{number:04}" for number in range(first_come._MOST_ENDED + 10)]
    order = follow(Order(), [(name, 1) for name in names], {}, 1, NOW)
    order = follow(order, [("new", 1)], {name: timedelta(hours=1) for name in names}, 1, at(1))
    assert [turn.name for turn in order.turns] == [*names[10:], "new"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(1, 30)), max_size=12), st.integers(1, 8))
def test_no_node_is_held_twice_and_all_start_in_order(jobs: list[tuple[int, int, int]], nodes: int) -> None:
    order = Order()
    for minute in range(0, 400, 5):
        live = [(f"{number:02}", asked) for number, (come, asked, _) in enumerate(sorted(jobs)) if come <= minute]
        ended = {
            f"{number:02}": timedelta(minutes=work)
            for number, (come, _, work) in enumerate(sorted(jobs))
            if come + 1 < minute
        }
        live = [one for one in live if one[0] not in ended]
        order = follow(order, live, ended, nodes, at(minute))
        held = sum(min(turn.asked, nodes) for turn in order.turns if turn.started_at is not None)
        assert held <= nodes
        begun = [turn.started_at for turn in order.turns if turn.started_at is not None]
        assert begun == sorted(begun)
    assert not order.turns
