"""Detects stalls: measures the step time of a node's ranks, and the time since any of them stepped.

A rank that hangs in a collective stops the others with it. So not the slowest rank counts here but any rank: as long
as one of them steps, the node is not stalled. How long ranks go without a step where nothing is wrong differs from job
to job, so that is learned from the job's own steps.
"""

from __future__ import annotations

import math
from collections import Counter

_PAUSE = 5.0
"""Seconds without a step, and usual steps that could have been made in them, from which on that is a pause."""
_RARE = 0.001
"""The share of the gaps between steps that are longer than the usual ones: a limit lies above them."""
_FEWEST = round(1 / _RARE)
"""Gaps that must be known for that: of fewer, none may have been a rare one."""
_MOST = 16 * _FEWEST
"""Gaps that count; then each counts half, so that the newest ones do."""
_TIMES = 4
"""How many times as long as the rare gaps, and as their distance from the usual ones, the learned limit is."""
_WIDTH = math.log(1.1)
"""Gaps that differ by less than a tenth are one in the sketch; those of 0.1 s to a week are 165 kinds."""
_SHORTEST, _LONGEST = 0.1, 7 * 86400.0


class GapSketch:
    """How long the ranks of a node go without a step, in a bounded space whatever the number of steps."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0

    def add(self, seconds: float) -> None:
        """Adds the time from one sample with a new step to the next."""
        bounded = min(max(seconds, _SHORTEST), _LONGEST)
        self._counts[math.ceil(math.log(bounded) / _WIDTH)] += 1
        self._total += 1
        if self._total >= _MOST:
            self._counts = Counter({kind: count // 2 for kind, count in self._counts.items() if count > 1})
            self._total = self._counts.total()

    @property
    def limit(self) -> float | None:
        """Seconds that are far longer than any gap but the rarest; None where too few are known."""
        if self._total < _FEWEST:
            return None
        rare = self._quantile(1 - _RARE)
        return _TIMES * (rare + rare - self._quantile(0.5))

    def _quantile(self, share: float) -> float:
        left = share * self._total
        for kind in sorted(self._counts):
            left -= self._counts[kind]
            if left <= 0:
                break
        return math.exp(kind * _WIDTH)


class StallDetector:
    """The step times of one generation. Times are seconds on the monotonic clock, as exact as the samples are
    frequent."""

    def __init__(self, gaps: GapSketch) -> None:
        """Creates the detector.

        Args:
            gaps: What is known of the node's earlier generations, to which it adds.
        """
        self._gaps = gaps
        self._steps: tuple[int, ...] = ()
        self._began: tuple[float, int] | None = None
        """The time and the highest step at the first sample."""
        self._moved_at = 0.0
        self._pauses: list[float] = []

    def follow(self, steps: tuple[int, ...], now: float) -> None:
        """Adds a sample: the steps of the ranks that have made any."""
        if not steps or steps == self._steps:
            return
        if self._began is not None:
            self._gaps.add(now - self._moved_at)
        if (usual := self.usual) is not None and now - self._moved_at >= max(_PAUSE, _PAUSE * usual):
            self._pauses.append(now - self._moved_at)
        if self._began is None or max(steps) < max(self._steps):
            # Counted steps are replaced by reported ones as soon as there are any, so numbers may jump back once.
            self._began = (now, max(steps))
        self._steps, self._moved_at = steps, now

    def excuse(self, now: float) -> None:
        """Takes it that the ranks need not have stepped until now, as they wait at a step by request: that is no pause,
        no gap between steps, and no part of any."""
        if self._began is not None:
            began, first = self._began
            self._began = began + now - self._moved_at, first
            self._moved_at = now

    def take_pauses(self) -> list[float]:
        """Returns the seconds of each pause that has ended since the last call."""
        taken, self._pauses = self._pauses, []
        return taken

    @property
    def usual(self) -> float | None:
        """Seconds per step, including pauses; None before the second step."""
        if self._began is None:
            return None
        began, first = self._began
        made = max(self._steps) - first
        return (self._moved_at - began) / made if made > 0 else None

    @property
    def learned(self) -> float | None:
        """Seconds without a step that no usual gap explains; None while too little is known."""
        return self._gaps.limit

    def idle(self, now: float) -> float | None:
        """Returns the seconds since any rank stepped; None before the first step."""
        return None if self._began is None else now - self._moved_at
