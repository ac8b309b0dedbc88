"""Tests of sets of spans, against sets of numbers."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from perdure.workflows.policy.services.spans import Spans, difference, intersection, overlaps, size, union

numbers = st.frozensets(st.integers(0, 40))


def spans(of: frozenset[int]) -> Spans:
    return union((number, number + 1) for number in of)


def members(of: Spans) -> frozenset[int]:
    return frozenset(number for first, end in of for number in range(first, end))


@given(numbers, numbers)
def test_they_behave_as_sets_of_numbers(one: frozenset[int], other: frozenset[int]):
    assert union(spans(one), spans(other)) == spans(one | other)
    assert difference(spans(one), spans(other)) == spans(one - other)
    assert intersection(spans(one), spans(other)) == spans(one & other)
    assert size(spans(one)) == len(one)
    assert members(spans(one)) == one


@given(numbers, st.integers(0, 40), st.integers(0, 40))
@example(frozenset({3, 4, 5}), 4, 4)
@example(frozenset({5}), 3, 5)
def test_a_span_overlaps_a_set_that_has_one_of_its_numbers(one: frozenset[int], first: int, end: int):
    assert overlaps((first, end), spans(one)) is bool(one.intersection(range(first, end)))
