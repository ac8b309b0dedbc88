"""Sets of positions as ascending spans: union, difference and size. All functions are linear in the number of spans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter

from perdure.contract.datasets import Span

Spans = tuple[Span, ...]

_END = itemgetter(1)


def union(*sets: Iterable[Span]) -> Spans:
    """Returns the positions that are in any of the sets; adjacent spans become one."""
    merged: list[Span] = []
    for first, end in sorted(span for spans in sets for span in spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def difference(spans: Spans, removed: Spans) -> Spans:
    """Returns the positions of the first set that are not in the second, of which only what overlaps is looked at."""
    if not removed:
        return spans
    rest: list[Span] = []
    index = 0
    for first, end in spans:
        index = bisect_right(removed, first, lo=index, key=_END)
        at, begin = index, first
        while at < len(removed) and removed[at][0] < end:
            if begin < removed[at][0]:
                rest.append((begin, removed[at][0]))
            begin = max(begin, removed[at][1])
            at += 1
        if begin < end:
            rest.append((begin, end))
    return tuple(rest)


def intersection(one: Spans, other: Spans) -> Spans:
    """Returns the positions that are in both sets."""
    return difference(one, difference(one, other))


def overlaps(span: Span, others: Spans) -> bool:
    """Returns whether a span has positions of a set."""
    index = bisect_right(others, span[0], key=_END)
    return span[0] < span[1] and index < len(others) and others[index][0] < span[1]


def size(spans: Iterable[Span]) -> int:
    """Returns the number of positions."""
    return sum(end - first for first, end in spans)
