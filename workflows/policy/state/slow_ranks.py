"""What a role remembers of ranks for which all others wait: see `perdure.workflows.policy.repair.slow_ranks`."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from perdure.contract import Incarnation, Message, Slowness


class SlowNode(Message):
    """A node with a slow rank, in the current world."""

    slowness: Slowness
    incarnation: int
    generation: int
    since: datetime
    """When the job learned of it."""


class Experiment(Message):
    """Two nodes have exchanged their places, so that it shows whether slowness follows the machine."""

    slowness: Slowness
    suspect: Incarnation
    partner: Incarnation
    local_rank: int
    """The position of the slow rank among those of its node."""
    places: tuple[int, int]
    """The group ranks of the suspect and of its partner before."""
    generation: int
    """The world in which they are exchanged."""
    until: datetime
    """When it ends without a verdict."""


class SlowRanks(Message):
    """What is known of slow ranks within a stage of the command."""

    suspect: SlowNode | None = None
    experiment: Experiment | None = None
    acted_at: datetime | None = None
    """When an experiment or a replacement last began."""
    replaced: dict[int, int] = Field(default={})
    """Incarnations that were replaced, by node (slot), until the times of their successors are known."""
    own_work: dict[int, int] = Field(default={})
    """Ranks that are slow on another machine, too, with the size of the world of which that is known."""
