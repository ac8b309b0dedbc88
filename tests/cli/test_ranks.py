"""Tests of how commands read and write global ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.base.errors import PerdureError
from perdure.cli.ranks import parse_ranks, rank_numbers


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([5], "rank 5"), ([0, 1, 2, 3, 7], "ranks 0-3, 7"), ([3, 1], "ranks 1, 3"), ([1, 0], "ranks 0-1")],
)
def test_ranks_are_written_as_spans(ranks: list[int], text: str):
    assert rank_numbers(ranks) == text


@given(st.integers(0, 10_000), st.integers(0, 300))
def test_a_span_is_read_as_it_is_written(first: int, more: int):
    ranks = range(first, first + more + 1)
    assert parse_ranks(rank_numbers(ranks).removeprefix("ranks ").removeprefix("rank ")) == ranks


@pytest.mark.parametrize("text", ["", "-", "a", "1-", "-1", "1,2", "1-2-3"])
def test_anything_else_is_refused_with_what_is_expected(text: str):
    with pytest.raises(PerdureError, match="expected a global rank such as 5"):
        parse_ranks(text)
