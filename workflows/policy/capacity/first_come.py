"""Follows what jobs would have without sharing: what they ask for, in the order of submission, from start to end.

It gives the time for which each job would have waited for its first nodes. A job that has got less than that order
would have given it until now is late, and `sharing.py` lets it have what it asks for before others get more.

How long a job trains is known only once it has ended. Until then it keeps its nodes in this order, so a job that is
late holds up those after it here as it would without sharing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from perdure.contract import Message

_MOST_ENDED = 500
"""Ended jobs that still count: the history of a cluster's workflow carries them."""


class Turn(Message):
    """A job in the order of submission."""

    name: str
    asked: int
    """The nodes that it counts on."""
    started_at: datetime | None = None
    """When it would have got them."""
    work: timedelta | None = None
    """How long it trains with them; None until it has ended."""


class Order(Message):
    """The jobs of a pool of nodes that have not ended in this order."""

    seen_at: datetime | None = None
    turns: tuple[Turn, ...] = ()

    def waits(self, submitted_at: datetime, name: str, now: datetime) -> timedelta:
        """Returns how long a job would have waited until now for its first nodes."""
        for turn in self.turns:
            if turn.name == name:
                return max((turn.started_at or now) - submitted_at, timedelta())
        return timedelta()


def follow(
    order: Order, jobs: Sequence[tuple[str, int]], work: Mapping[str, timedelta], nodes: int, now: datetime
) -> Order:
    """Returns the order at a time.

    Args:
        order: As it was.
        jobs: The jobs that have not ended, as they were submitted, each with the nodes that it counts on.
        work: How long jobs that have ended since would have trained with these nodes.
        nodes: The nodes of all together.
        now: The present time.
    """
    asked = dict(jobs)
    turns = [_updated(turn, asked, work) for turn in order.turns]
    seen_at = order.seen_at or now
    while ended := min(((end, turn.name) for turn in turns if (end := _end(turn)) and end <= now), default=None):
        # What was not known when it happened cannot begin before now.
        seen_at = max(seen_at, ended[0])
        turns = _start([turn for turn in turns if turn.name != ended[1]], nodes, seen_at)
    known = {turn.name for turn in turns}
    turns += [Turn(name=name, asked=number) for name, number in jobs if name not in known]
    return Order(seen_at=now, turns=_bounded(_start(turns, nodes, now)))


def _updated(turn: Turn, jobs: Mapping[str, int], work: Mapping[str, timedelta]) -> Turn:
    if turn.name in jobs:
        asked = jobs[turn.name]
        return turn if (turn.asked, turn.work) == (asked, None) else turn.replace(asked=asked, work=None)
    return turn if turn.work is not None else turn.replace(work=work.get(turn.name, timedelta()))


def _end(turn: Turn) -> datetime | None:
    return None if turn.started_at is None or turn.work is None else turn.started_at + turn.work


def _start(turns: Sequence[Turn], nodes: int, now: datetime) -> list[Turn]:
    """Gives those that wait their nodes, until one has no room."""
    left = nodes - sum(min(turn.asked, nodes) for turn in turns if turn.started_at is not None)
    found = list(turns)
    for at, turn in enumerate(found):
        if turn.started_at is not None:
            continue
        number = min(turn.asked, nodes)
        if number > left:
            break
        left -= number
        found[at] = turn.replace(started_at=now)
    return found


def _bounded(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Without the oldest of those that have ended, if there are too many."""
    ended = [turn.name for turn in turns if turn.work is not None]
    dropped = set(ended[: max(len(ended) - _MOST_ENDED, 0)])
    return tuple(turn for turn in turns if turn.name not in dropped)
