"""Tests of the next world: sizes, members, ranks and stores."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import Member, NodePhase, World
from perdure.spec.network import Network
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world.rendezvous import (
    assign_group_ranks,
    choose_members,
    choose_store,
    form_world,
    ports_remembered,
    usable,
)


def node(rank: int, **fields: Any) -> NodeState:
    known: dict[str, Any] = {"incarnation": 1, "token": "t", "phase": NodePhase.READY, "store_ports": (100 + rank,)}
    since = datetime(2026, 1, 1, tzinfo=UTC)
    return NodeState(rank=rank, since=since, address=f"10.0.0.{rank}", **known | fields)


def world(*ranks: int) -> World:
    """A world whose group ranks are in the order given."""
    members = {
        rank: Member(incarnation=1, group_rank=place, base_rank=place, processes=1) for place, rank in enumerate(ranks)
    }
    return World(
        generation=1,
        members=members,
        nodes=len(members),
        processes=len(members),
        store_address="10.0.0.0",
        store_port=1,
        store_rank=ranks[0],
    )


@pytest.mark.parametrize(
    ("count", "minimum", "maximum", "unit", "expected"),
    [
        (0, 1, 4, 1, 0),
        (1, 2, 4, 1, 0),
        (3, 2, 4, 1, 3),
        (9, 2, 4, 1, 4),
        (3, 2, 6, 2, 2),
        (5, 2, 6, 2, 4),
        (7, 2, 6, 2, 6),
        (3, 4, 8, 4, 0),
        (2, 1, 8, 4, 0),
    ],
)
def test_sizes_are_whole_units_between_the_bounds(count: int, minimum: int, maximum: int, unit: int, expected: int):
    assert usable(count, minimum=minimum, maximum=maximum, unit=unit) == expected


@pytest.mark.parametrize(
    ("candidates", "size", "previous", "expected"),
    [
        ([3, 1, 2, 0], 4, None, [0, 1, 2, 3]),
        ([3, 1, 2, 0], 2, None, [0, 1]),
        ([0, 1, 2, 3], 2, world(2, 3), [2, 3]),
        ([0, 1, 3], 2, world(2, 3), [0, 3]),
        ([0, 1, 2], 3, world(0, 1), [0, 1, 2]),
    ],
)
def test_members_stay_members(candidates: list[int], size: int, previous: World | None, expected: list[int]):
    assert choose_members([node(rank) for rank in candidates], size, previous) == expected


@pytest.mark.parametrize(
    ("ranks", "previous", "expected"),
    [
        ([0, 1, 2], None, {0: 0, 1: 1, 2: 2}),
        ([0, 2], world(0, 1, 2), {0: 0, 2: 1}),
        ([1, 2], world(0, 1, 2), {1: 1, 2: 0}),
        ([0, 1, 2], world(0, 2), {0: 0, 1: 2, 2: 1}),
        ([3, 4], world(0, 1), {3: 0, 4: 1}),
    ],
)
def test_survivors_keep_their_ranks_and_others_fill_the_holes(
    ranks: list[int], previous: World | None, expected: dict[int, int]
):
    assert assign_group_ranks(ranks, previous) == expected


@given(st.permutations(range(8)), st.sets(st.integers(0, 7), min_size=1))
def test_group_ranks_are_complete_and_stable(before: list[int], after: set[int]):
    previous = world(*before)
    ranks = assign_group_ranks(sorted(after), previous)
    assert sorted(ranks.values()) == list(range(len(after)))
    for rank in after:
        if previous.members[rank].group_rank < len(after):
            assert ranks[rank] == previous.members[rank].group_rank


def test_the_store_is_at_the_first_rank_that_has_a_port_and_can_be_told():
    nodes = {0: node(0, store_ports=()), 1: node(1, reachable=False), 2: node(2), 3: node(3)}
    store = choose_store(nodes, {0: 0, 1: 1, 2: 3, 3: 2})
    assert store is not None
    assert (store.rank, store.address, store.port) == (3, "10.0.0.3", 103)


def test_a_world_needs_a_port_for_its_store():
    nodes = {0: node(0, store_ports=()), 1: node(1, store_ports=())}
    assert form_world(nodes, [0, 1], generation=1, previous=None) is None


@pytest.mark.parametrize(("ports", "expected"), [(None, 64), ("29500-29507", 1), ("29500-29599", 12), ("1-9999", 64)])
def test_of_few_ports_only_the_last_few_are_remembered_as_used(ports: str | None, expected: int):
    assert ports_remembered(Network(store_ports=ports)) == expected


def test_base_ranks_follow_group_ranks():
    nodes = {0: node(0, processes=4), 1: node(1, processes=2), 2: node(2, processes=1)}
    formed = form_world(nodes, [0, 1, 2], generation=5, previous=world(2, 0))
    assert formed is not None
    places = {rank: (member.group_rank, member.base_rank) for rank, member in formed.members.items()}
    assert places == {2: (0, 0), 0: (1, 1), 1: (2, 5)}
    assert (formed.generation, formed.nodes, formed.processes) == (5, 3, 7)
