"""Which node keeps another one's copies, and the token that it asks for."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from workflows.policy.copies import choose_holder, copies_token


def test_two_nodes_keep_each_others() -> None:
    assert choose_holder(0, holders={}, receivers={0, 1}) == 1
    assert choose_holder(1, holders={0: 1}, receivers={0, 1}) == 0
    assert choose_holder(0, holders={}, receivers={0}) is None


def test_it_is_the_next_in_the_order_of_ranks_that_keeps_fewest() -> None:
    assert choose_holder(1, holders={}, receivers={0, 1, 2, 3}) == 2
    assert choose_holder(3, holders={}, receivers={0, 1, 2, 3}) == 0
    assert choose_holder(1, holders={0: 2}, receivers={0, 1, 2, 3}) == 3


def test_a_replacement_gets_the_node_that_has_the_copies_of_the_one_before() -> None:
    assert choose_holder(1, holders={1: 3, 2: 3}, receivers={0, 1, 2, 3}) == 3
    assert choose_holder(1, holders={1: 3}, receivers={0, 1, 2}) == 2, "it is lost, and they are with it"


@given(st.sets(st.integers(0, 127), min_size=2, max_size=40), st.randoms())
def test_nobody_keeps_its_own_or_many_more_than_others(ranks: set[int], random: Random) -> None:
    holders: dict[int, int] = {}
    for rank in random.sample(sorted(ranks), len(ranks)):
        holder = choose_holder(rank, holders=holders, receivers=ranks)
        assert holder is not None
        holders[rank] = holder
    assert all(owner != holder for owner, holder in holders.items())
    assert max(Counter(holders.values()).values()) <= 2


def test_a_token_is_of_one_owner_and_one_receiver() -> None:
    known = copies_token("secret", role="worker", rank=1)
    assert known == copies_token("secret", role="worker", rank=1)
    assert (
        len({known, copies_token("secret", role="worker", rank=11), copies_token("other", role="worker", rank=1)}) == 3
    )
    assert "secret" not in known
