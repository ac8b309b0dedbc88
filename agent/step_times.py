"""Decides when the job is told how the steps of a node's ranks split: once in a world, and again where that changes.

A job compares the ranks of all nodes, and needs no news of what stays as it is: each report costs events of histories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from perdure.contract import RankStepTimes
from perdure_training.node_api.progress_file import StepTimes

_KEPT = 3
"""Measurements of a rank of which the middle one is reported, or the lower one of the first two."""
_CHANGED = 0.05
"""Changes of a rank's computation that are reported, as a share of its step."""
_AGAIN = 60.0
"""Seconds between two reports, at least."""
_MOST_RANKS = 1024
"""Ranks of a job beyond which a node reports only its slowest rank: a job keeps all reports in its state."""


class StepTimesReports:
    """The reports of one node."""

    def __init__(self) -> None:
        self._generation = 0
        self._measured: dict[int, deque[StepTimes]] = {}
        self._reported: dict[int, float] = {}
        self._reported_at = 0.0

    def follow(
        self, times: Mapping[int, StepTimes], *, generation: int, processes: int, nodes: int, now: float
    ) -> tuple[RankStepTimes, ...]:
        """Takes in the newest measurements, and returns what is to be reported now; mostly nothing.

        Args:
            times: The newest measurement of each rank.
            generation: The generation of the ranks.
            processes: The number of the node's ranks.
            nodes: The most nodes that the job has.
            now: Seconds on the monotonic clock.
        """
        if generation != self._generation:
            self._generation, self._measured, self._reported = generation, {}, {}
        for rank, measured in times.items():
            known = self._measured.setdefault(rank, deque(maxlen=_KEPT))
            # The first one has the warm-up of caches and compilers.
            if measured.known and measured.readings > max(1, known[-1].readings if known else 0):
                known.append(measured)
        usual = {rank: _middle(known) for rank, known in self._measured.items() if len(known) > 1}
        if len(usual) < processes or (self._reported and now - self._reported_at < _AGAIN):
            return ()
        if self._reported and not any(self._has_changed(rank, measured) for rank, measured in usual.items()):
            return ()
        self._reported_at = now
        self._reported = {rank: measured.compute for rank, measured in usual.items()}
        ranks = [
            RankStepTimes(rank=rank, compute=measured.compute, wait=measured.wait, rest=measured.rest)
            for rank, measured in sorted(usual.items())
        ]
        return (max(ranks, key=lambda one: one.compute),) if processes * nodes > _MOST_RANKS else tuple(ranks)

    def _has_changed(self, rank: int, measured: StepTimes) -> bool:
        step = measured.compute + measured.wait + measured.rest
        return abs(measured.compute - self._reported.get(rank, 0.0)) > _CHANGED * step


def _middle(measured: deque[StepTimes]) -> StepTimes:
    in_order = sorted(measured, key=lambda one: one.compute)
    return in_order[(len(in_order) - 1) // 2]
