"""Which node keeps another one's copies, and the token that it asks for."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from perdure.workflows.policy.checkpoints.copies import choose_target, copies_token


def unknown(*ranks: int) -> dict[int, str]:
    """Receivers whose racks are unknown."""
    return dict.fromkeys(ranks, "")


def test_two_nodes_keep_each_others() -> None:
    assert choose_target(0, targets={}, receivers=unknown(0, 1)) == 1
    assert choose_target(1, targets={0: 1}, receivers=unknown(0, 1)) == 0
    assert choose_target(0, targets={}, receivers=unknown(0)) is None


def test_it_is_the_next_in_the_order_of_ranks_that_keeps_fewest() -> None:
    assert choose_target(1, targets={}, receivers=unknown(0, 1, 2, 3)) == 2
    assert choose_target(3, targets={}, receivers=unknown(0, 1, 2, 3)) == 0
    assert choose_target(1, targets={0: 2}, receivers=unknown(0, 1, 2, 3)) == 3


def test_a_replacement_gets_the_node_that_has_the_copies_of_the_one_before() -> None:
    assert choose_target(1, targets={1: 3, 2: 3}, receivers=unknown(0, 1, 2, 3)) == 3
    assert choose_target(1, targets={1: 3}, receivers=unknown(0, 1, 2)) == 2, "it is lost, and they are with it"


def test_copies_are_kept_in_another_rack() -> None:
    racks = {0: "a", 1: "a", 2: "b", 3: "b"}
    targets: dict[int, int] = {}
    for rank in racks:
        target = choose_target(rank, targets=targets, receivers=racks)
        assert target is not None
        targets[rank] = target
    assert targets == {0: 2, 1: 3, 2: 0, 3: 1}
    assert choose_target(0, targets={0: 1}, receivers=racks) == 1, "it has the copies of the node before"


def test_the_node_of_a_small_rack_does_not_keep_the_copies_of_all_others() -> None:
    racks = {0: "a"} | dict.fromkeys(range(1, 10), "b")
    targets: dict[int, int] = {}
    for rank in racks:
        target = choose_target(rank, targets=targets, receivers=racks)
        assert target is not None
        targets[rank] = target
    assert Counter(targets.values())[0] == 2


@given(
    st.dictionaries(st.integers(0, 127), st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=40), st.randoms()
)
def test_nobody_keeps_its_own_or_many_more_than_others(racks: dict[int, str], random: Random) -> None:
    targets: dict[int, int] = {}
    for rank in random.sample(sorted(racks), len(racks)):
        target = choose_target(rank, targets=targets, receivers=racks)
        assert target is not None
        targets[rank] = target
    assert all(owner != target for owner, target in targets.items())
    assert max(Counter(targets.values()).values()) <= 4


def test_a_token_is_of_one_owner_and_one_receiver() -> None:
    known = copies_token("secret", role="worker", rank=1)
    assert known == copies_token("secret", role="worker", rank=1)
    assert (
        len({known, copies_token("secret", role="worker", rank=11), copies_token("other", role="worker", rank=1)}) == 3
    )
    assert "secret" not in known
