"""Sets of positions as ascending spans, as this side of the agent's socket needs them."""

from __future__ import annotations

from collections.abc import Iterable

from perdure_training.node_api.agent_client import Json

Span = tuple[int, int]
"""The positions from the first number, included, to the second, excluded."""


def merge(*sets: Iterable[Span]) -> list[Span]:
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


def consumed_before(position: Json) -> list[Span]:
    """Returns what was consumed at a position."""
    return gaps([(first, end) for first, end in position["holes"]], position["next"])


def position_of(consumed: list[Span]) -> Json:
    """Returns the position at which these ascending spans were consumed."""
    end = consumed[-1][1] if consumed else 0
    return {"next": end, "holes": [[first, last] for first, last in gaps(consumed, end)]}


def advance(position: Json, consumed: list[Span]) -> Json:
    """Returns the position after more was consumed."""
    return position_of(merge(consumed_before(position), consumed))


def length(spans: Iterable[Span]) -> int:
    """Returns the number of positions."""
    return sum(end - first for first, end in spans)


def without(span: Span, removed: list[Span]) -> list[Span]:
    """Returns the positions of a span that are in none of the others."""
    rest = [span]
    for one in removed:
        rest = [left for part in rest for left in _without_one(part, one)]
    return rest


def _without_one(span: Span, removed: Span) -> list[Span]:
    first, end = span
    rest = [(first, min(end, removed[0])), (max(first, removed[1]), end)]
    if removed[0] >= end or removed[1] <= first:
        return [span]
    return [one for one in rest if one[0] < one[1]]
