"""What a role knows of its speed with different numbers of nodes: see `perdure.workflows.policy.capacity.scaling`."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Message, Pace, Resized


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
    resized: tuple[Resized, ...] = ()
    """The newest choices, the oldest first."""
