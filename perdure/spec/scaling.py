"""The number of nodes that an elastic role trains with."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import Section
from .durations import PositiveDuration


class ScalingPolicy(StrEnum):
    """Ways to choose the number of nodes between `nodes.min` and `nodes.max`."""

    MAX = "max"
    """As many as there are."""
    EFFICIENT = "efficient"
    """As many as still pay: measures how fast the job is with different numbers, and keeps the largest one whose last
    nodes add `min_efficiency` of what the nodes before them do."""


class BatchSize(StrEnum):
    """What the number of samples in a step depends on."""

    PER_RANK = "per-rank"
    """Each rank has a fixed number: a step of more nodes has more samples."""
    GLOBAL = "global"
    """A step has a fixed number, as with `perdure_training.elastic.GlobalBatch`: with more nodes it is shorter."""


class Scaling(Section):
    """The choice of the number of nodes, for elastic roles."""

    policy: ScalingPolicy = ScalingPolicy.MAX
    """`max` trains with as many nodes as there are; `efficient` measures the speed with different numbers, and keeps
    the largest one whose last nodes still pay (docs/scaling.md)."""
    min_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The share of the speed of the nodes before them that further nodes must add: with 0.7, going from 4 nodes to 8
    must make the job at least 1.7 times as fast."""
    batch: BatchSize = BatchSize.PER_RANK
    """What more nodes do to a step: `per-rank`, each rank has a fixed number of samples, so a step has more of them;
    `global`, a step has a fixed number of samples, so it is shorter."""
    settle: PositiveDuration = timedelta(seconds=30)
    """The time of steps in a world over which its speed is measured; at least 20 steps."""
    patience: PositiveDuration = timedelta(minutes=10)
    """How long nodes that `policy` has requested are waited for. Those that have not come are given up, and requested
    again after twice this time, then after twice as long each time, at most after 4 hours."""
