"""How fast a job is with different numbers of nodes: as measured, and in between as its steps suggest.

Between two measurements the time of a step is taken as a straight line: over 1/nodes where a step has a fixed number of
samples, so that its computation is divided by the nodes and its communication is not; over nodes where each rank has a
fixed number. That is exact with two of them and such a law, and where the law is another one, each further measurement
corrects it.

Where communication grows with the nodes, steps are shortest with some number in the middle, which no straight line
shows. Three measurements do: if c/nodes + a + e * nodes through them has its valley among them, that form counts there.
Two leave it open, and say where it would be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from perdure.contract import Pace

_LEAST = 1 / 4
"""The shortest step that is expected anywhere, as a share of the shortest one that was measured."""
_WORTH_A_LOOK = 0.03
"""How much shorter a step may be in a valley that is looked for, as a share: it may be missed by one number, and a try
costs two changes."""


class Expected(NamedTuple):
    """The time of a step."""

    seconds: float
    spread: float
    measured: bool


class Throughput:
    """The measurements of one job."""

    def __init__(self, paces: Sequence[Pace], *, global_batch: bool) -> None:
        """Takes the measurements.

        Args:
            paces: One for each number of nodes that was measured.
            global_batch: Steps have a fixed number of samples; otherwise their number grows with that of the nodes.
        """
        self._paces = sorted(paces, key=lambda pace: pace.nodes)
        self._global_batch = global_batch

    def step(self, nodes: int) -> Expected | None:
        """Returns how long a step takes; None where too little is measured to say."""
        for pace in self._paces:
            if pace.nodes == nodes:
                return Expected(pace.step, pace.spread, measured=True)
        if len(self._paces) < 2:
            return None
        above = next((at for at, pace in enumerate(self._paces) if pace.nodes > nodes), len(self._paces))
        at = min(max(above - 1, 0), len(self._paces) - 2)
        lower, upper = self._paces[at : at + 2]
        share = (self._x(nodes) - self._x(lower.nodes)) / (self._x(upper.nodes) - self._x(lower.nodes))
        weights = self._valley(at, nodes) if lower.nodes < nodes < upper.nodes else None
        weights = weights or [(lower, 1 - share), (upper, share)]
        seconds = sum(weight * pace.step for pace, weight in weights)
        spread = sum(abs(weight) * pace.spread for pace, weight in weights)
        return Expected(max(seconds, _LEAST * min(pace.step for pace in self._paces)), spread, measured=False)

    def longest_step(self, nodes: int) -> float:
        """Returns the longest step that the measurements with other numbers let expect, in seconds; without any,
        infinity.

        More nodes are not slower than fewer where they share the samples of a step, and fewer are not slower than by
        their share. What was measured with this number counts first.
        """
        expected = self.step(nodes)
        if expected is not None:
            return expected.seconds
        bounds = (
            pace.step * max(pace.nodes / nodes if self._global_batch else 1.0, 1.0)
            for pace in self._paces
            if self._global_batch or pace.nodes > nodes
        )
        return min(bounds, default=math.inf)

    def _valley(self, at: int, nodes: int) -> list[tuple[Pace, float]] | None:
        """Returns the weights of three measurements in the time of a step between two of them; None where these show
        no valley.

        Args:
            at: The index of the measurement below.
            nodes: A number of nodes between that one and the next.
        """
        if not self._global_batch or len(self._paces) < 3:
            return None
        three = self._paces[at - 1 : at + 2] if at else self._paces[:3]
        found = {pace.nodes for pace in three}
        # The time of a step, times the nodes, is a quadratic polynomial of the nodes.
        (x0, y0), (x1, y1), (x2, y2) = ((pace.nodes, pace.nodes * pace.step) for pace in three)
        slope = (y1 - y0) / (x1 - x0)
        grows = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
        shared = y0 - slope * x0 + grows * x0 * x1
        if min(grows, shared) <= 0:
            return None
        if not x0 < math.sqrt(shared / grows) < x2:
            return None
        return [
            (pace, pace.nodes / nodes * math.prod((nodes - one) / (pace.nodes - one) for one in found - {pace.nodes}))
            for pace in three
        ]

    def possible_valley(self, nodes: int, sizes: Sequence[int]) -> int | None:
        """Returns fewer nodes with which steps may be shorter, though a straight line says the contrary; None where
        the measurements leave no such doubt.

        Args:
            nodes: The larger one of two numbers that were measured.
            sizes: The numbers of nodes to choose from.
        """
        if not self._global_batch or len(self._paces) != 2 or self._paces[1].nodes != nodes:
            return None
        fewer, more = self._paces
        # The time of a step is shared/nodes + grows * nodes, if all of the communication grows with the nodes.
        grows = (more.nodes * more.step - fewer.nodes * fewer.step) / (more.nodes**2 - fewer.nodes**2)
        shared = fewer.nodes * (fewer.step - grows * fewer.nodes)
        if min(grows, shared) <= 0:
            return None

        def step(size: int) -> float:
            return shared / size + grows * size

        shortest = min((size for size in sizes if fewer.nodes < size < nodes), key=step, default=nodes)
        return shortest if step(shortest) <= (1 - _WORTH_A_LOOK) * more.step else None

    def is_measured(self, nodes: int) -> bool:
        """Whether it is known how fast the job is with this number of nodes."""
        return any(pace.nodes == nodes for pace in self._paces)

    def speed(self, nodes: int) -> float | None:
        """Returns samples per second, in the unit of the samples of one node's step, or of one global batch."""
        expected = self.step(nodes)
        return None if expected is None else (1 if self._global_batch else nodes) / expected.seconds

    def efficient(self, sizes: Sequence[int], min_efficiency: float) -> int | None:
        """Returns the largest size up to which each one's last nodes add what they must; None where too little is
        measured.

        Args:
            sizes: The numbers of nodes to choose from, ascending.
            min_efficiency: The share of the speed of the nodes before that further nodes must add.
        """
        chosen = sizes[0]
        for size in sizes[1:]:
            before, after = self.speed(chosen), self.speed(size)
            if before is None or after is None:
                return None
            if after / before - 1 < min_efficiency * (size / chosen - 1):
                break
            chosen = size
        return chosen

    def _x(self, nodes: int) -> float:
        return 1 / nodes if self._global_batch else float(nodes)
