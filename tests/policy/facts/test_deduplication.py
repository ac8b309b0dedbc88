"""Tests that a job accepts each transition of a group once, however often it is delivered."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure.contract import GroupTransitions
from perdure.contract.transitions import NodeReady
from perdure.workflows.policy.facts.deduplication import accept, begin_ownership_epoch
from perdure.workflows.policy.state.role import RoleState
from tests.policy.scenario import Scenario

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def message(sequence: int, before: int | None, *ranks: int, group: int = 0) -> GroupTransitions:
    transitions = tuple(NodeReady(rank=rank, incarnation=1, time=NOW) for rank in ranks)
    return GroupTransitions(uid="0", group=group, sequence=sequence, before=before, transitions=transitions)


def taken(role: RoleState, *messages: GroupTransitions) -> list[list[int] | None]:
    """The ranks of the transitions that are accepted of each message."""
    accepted: list[list[int] | None] = []
    for one in messages:
        role, transitions = accept(role, one)
        accepted.append(None if transitions is None else [transition.rank for transition in transitions])
    return accepted


def test_a_message_that_arrives_twice_or_late_is_taken_once():
    one, two = message(1, 0, 0, 1), message(2, 2, 2)
    assert taken(Scenario().state, one, one, two, one, two) == [[0, 1], None, [2], None, None]


def test_edges_that_arrived_although_their_delivery_seemed_to_fail_are_taken_once():
    assert taken(Scenario().state, message(1, 0, 0, 1), message(2, 0, 0, 1, 2)) == [[0, 1], [2]]


def test_groups_count_by_themselves():
    assert taken(Scenario().state, message(3, 4, 0), message(1, 0, 128, group=1)) == [[0], [128]]


def test_a_job_that_was_reset_takes_up_where_the_group_is():
    assert taken(Scenario().state, message(7, 40, 0)) == [[0]]


def test_a_group_that_is_started_again_counts_from_the_beginning():
    role, _ = accept(Scenario().state, message(7, 40, 0))
    assert taken(begin_ownership_epoch(role, 0, "another"), message(1, 0, 1)) == [[1]]


def test_a_group_of_an_older_release_does_not_count():
    assert taken(Scenario().state, message(1, None, 0), message(1, None, 0)) == [[0], [0]]


def test_a_group_that_was_reset_counts_from_an_earlier_moment_and_all_of_it_is_taken():
    first = message(7, 40, 0).replace(runs=("first",))
    reset = message(2, 1, 1).replace(runs=("reset",))
    later = message(3, 2, 2).replace(runs=("reset",))
    assert taken(Scenario().state, first, reset, reset, later) == [[0], [1], None, [2]]


def test_a_group_that_continues_as_new_goes_on_counting():
    before = message(7, 40, 0).replace(runs=("first",))
    seemed_to_fail = message(8, 41, 1).replace(runs=("first", "second"))
    third = message(9, 41, 1, 2).replace(runs=("first", "second", "third"))
    assert taken(Scenario().state, before, before, seemed_to_fail, third) == [[0], None, [1], [2]]
