"""Why what is in memory is not loaded, from what all ranks of a new world found there."""

from __future__ import annotations

from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots.agreement import Holding, decide
from perdure_training.snapshots.findings import (
    DAMAGED,
    MISSING,
    NO_ROOM,
    NOT_COMMON,
    OTHER_WORLD_SIZE,
    UNSOUND,
    Finding,
    Look,
    find_obstacles,
)


def held(rank: int, step: int, *, world_size: int = 2, replicated: bool = False) -> Holding:
    return Holding(rank=rank, step=step, generation=1, world_size=world_size, replicated=replicated, size=1, restores=0)


def found(*looks: Look, full: tuple[int, ...] = (), unsound: UnsoundSteps | None = None) -> list[Finding]:
    by_rank = dict(enumerate(looks))
    held = {rank: list(look.holdings) for rank, look in by_rank.items()}
    decision = decide(held, len(looks), full=full, unsound=unsound)
    return find_obstacles(by_rank, len(looks), decision, full=full, unsound=unsound)


def test_nothing_is_found_where_a_step_is_loaded_and_nothing_was_damaged():
    assert found(Look(node=0, holdings=[held(0, 5)]), Look(node=1, holdings=[held(1, 5)])) == []


def test_damage_is_found_also_where_another_step_is_loaded():
    looks = Look(node=0, holdings=[held(0, 5)], damaged=[(0, 6), (0, 7)]), Look(node=1, holdings=[held(1, 5)])
    assert found(*looks) == [Finding(rank=0, node=0, problem=DAMAGED, steps=(7, 6))]


def test_a_rank_whose_node_is_empty_and_whose_copies_are_damaged_has_both_findings():
    looks = (
        Look(node=0, origin="new"),
        Look(node=1, origin="adopted", holdings=[held(1, 5), held(1, 6)], damaged=[(0, 5), (0, 6)]),
    )
    assert found(*looks) == [
        Finding(rank=0, node=0, problem=MISSING, origin="new"),
        Finding(rank=0, node=1, problem=DAMAGED, steps=(6, 5)),
    ]


def test_the_ranks_that_lack_the_step_which_most_have_are_named():
    has = [Look(node=number, holdings=[held(number, 5, world_size=9)]) for number in range(8)]
    lacks = Look(node=8, holdings=[held(8, 6, world_size=9), held(8, 4, world_size=9)])
    assert found(*has, lacks) == [Finding(rank=8, node=8, problem=NOT_COMMON, steps=(6, 4))]


def test_a_copy_whose_step_no_other_rank_has_is_named_beside_the_damaged_ones():
    looks = (
        Look(node=0, origin="new"),
        Look(node=1, holdings=[held(1, 5), held(1, 6), held(0, 7)], damaged=[(0, 5), (0, 6)]),
    )
    assert found(*looks) == [
        Finding(rank=0, node=0, problem=MISSING, origin="new"),
        Finding(rank=0, node=1, problem=DAMAGED, steps=(6, 5)),
        Finding(rank=0, node=1, problem=NOT_COMMON, steps=(7,)),
    ]


def test_snapshots_of_a_world_of_another_size_are_named():
    looks = Look(node=0, holdings=[held(0, 5, world_size=3)]), Look(node=1, holdings=[held(1, 5, world_size=3)])
    assert [(one.node, one.problem, one.steps) for one in found(*looks)] == [
        (0, OTHER_WORLD_SIZE, (5,)),
        (1, OTHER_WORLD_SIZE, (5,)),
    ]


def test_a_node_without_room_for_what_another_would_send_is_named_first():
    looks = Look(node=0), Look(node=1, holdings=[held(1, 5, replicated=True)])
    assert found(*looks, full=(0,))[0] == Finding(rank=0, node=0, problem=NO_ROOM)


def test_a_large_world_that_lost_everything_reports_a_few_ranks():
    obstacles = found(*(Look(node=number, origin="new") for number in range(1000)))
    assert [one.rank for one in obstacles] == [0, 1, 2, 3]
    assert {one.problem for one in obstacles} == {MISSING}


def test_snapshots_from_which_a_bad_loss_followed_are_named_as_such():
    looks = Look(node=0, holdings=[held(0, 5), held(0, 6)]), Look(node=1, holdings=[held(1, 5), held(1, 6)])
    assert found(*looks, unsound=UnsoundSteps(generation=1, after=5)) == []
    assert found(*looks, unsound=UnsoundSteps(generation=1, after=4)) == [
        Finding(rank=rank, node=rank, problem=UNSOUND, steps=(6, 5)) for rank in (0, 1)
    ]
