"""What a role knows of its speed with different numbers of nodes: see `perdure.workflows.policy.capacity.scaling`."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from perdure.contract import Message, Pace, Resized, Suggestion

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


class StepAt(Message):
    """A step of a world, and when it was made."""

    generation: int
    step: int
    time: datetime


class TotalAt(Message):
    """How many steps the script says that the training makes, in a world of so many nodes."""

    nodes: int
    total: int


class ScalingState(Message):
    """The measurements of one role, and what was made of them."""

    largest: int | None = None
    """The most nodes that the specification or a user allows, while fewer were chosen; None where none were."""
    paces: tuple[Pace, ...] = ()
    """The newest measurement with each number of nodes, by that number."""
    paces_before: tuple[Pace, ...] = ()
    """Those that were known before the present world was measured."""
    slow_in: int = 0
    """The generation of the newest world whose measurement was left out since one of its ranks was slow."""
    judged: int = 0
    """The generation of the world whose measurement was last compared with those before it."""
    doubted_until: datetime | None = None
    """Until then nothing is made of the measurement of the present world, which was slower than expected: one of its
    ranks may be slow. None where it is not doubted."""
    tries: int = 0
    """Worlds that were formed to measure them, in the newest series."""
    began_at: datetime | None = None
    """When that series began; None where no time must pass before the next one."""
    first_step: StepAt | None = None
    """The first step that was told of the newest world whose speed was measured."""
    newest_step: StepAt | None = None
    """The newest one."""
    pauses: float = 1.0
    """The time that steps take together with all pauses, in times of the steps alone."""
    total: TotalAt | None = None
    """What the script has told last of the steps that the training makes; None where it tells nothing."""
    fixed_steps: bool | None = None
    """Whether that was the same with another number of nodes; None where it was told with one number only."""
    node_seconds: float = 0.0
    """Seconds that all nodes have taken together, where `policy` is `budget`."""
    counted_until: datetime | None = None
    """Until when they are counted."""
    problem: str = ""
    """Why no number of nodes reaches the goal, as users were told last; empty where one does."""
    awaited_since: datetime | None = None
    """When more nodes than the world has were requested; None once all of them train, and where none were."""
    missed: MissedNodes | None = None
    """Nodes that did not come; None where none are known to be missing."""
    advice: int = 0
    """The number of the newest advice of the cluster's sharing."""
    advised: Suggestion | None = None
    """That advice, as far as it was followed; None where a user has scaled the job since."""
    goal_at: datetime | None = None
    """When a user has changed the goal last; None where it is that of the job's beginning."""
    resized: tuple[Resized, ...] = ()
    """The newest choices, the oldest first."""

    def with_resized(self, resized: Resized) -> Self:
        return self.replace(resized=(*self.resized, resized)[-_KEPT:])
