"""What a role knows of its speed with different numbers of nodes: see `perdure.workflows.policy.capacity.scaling`."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from perdure.contract import Message, Pace, Resized

_KEPT = 10
"""Choices that are kept for users."""


class MissedNodes(Message):
    """Nodes that were requested for a larger world and did not come."""

    nodes: int
    """The fewest nodes of a world that were not there."""
    times: int
    """Requests in a row that were given up."""
    until: datetime
    """When they may be requested again."""


class ScalingState(Message):
    """The measurements of one role, and what was made of them."""

    largest: int | None = None
    """The most nodes that the specification or a user allows, while fewer were chosen; None where none were."""
    paces: tuple[Pace, ...] = ()
    """The newest measurement with each number of nodes, by that number."""
    tries: int = 0
    """Worlds that were formed to measure them, in the newest series."""
    began_at: datetime | None = None
    """When that series began; None where no time must pass before the next one."""
    awaited_since: datetime | None = None
    """When more nodes than the world has were requested; None once all of them train, and where none were."""
    missed: MissedNodes | None = None
    """Nodes that did not come; None where none are known to be missing."""
    resized: tuple[Resized, ...] = ()
    """The newest choices, the oldest first."""

    def with_resized(self, resized: Resized) -> Self:
        return self.replace(resized=(*self.resized, resized)[-_KEPT:])
