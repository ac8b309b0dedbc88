"""Sets of positions as ascending spans, as this side of the agent's socket needs them."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
"""The positions from the first number, included, to the second, excluded."""


def merged(*sets: Iterable[Span]) -> list[Span]:
    """Returns the positions that are in any of the sets; adjacent spans become one."""
    result: list[Span] = []
    for first, end in sorted(span for spans in sets for span in spans):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return result


def gaps(spans: Iterable[Span], end: int) -> list[Span]:
    """Returns the positions before `end` that are in none of the ascending spans."""
    result: list[Span] = []
    before = 0
    for first, last in spans:
        if before < min(first, end):
            result.append((before, min(first, end)))
        before = max(before, last)
    if before < end:
        result.append((before, end))
    return result
