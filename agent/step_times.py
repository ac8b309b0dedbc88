"""Decides when the job is told how the steps of a node's ranks split: once in a world, and again where that changes.

A job compares the ranks of all nodes, and needs no news of what stays as it is: each report costs events of histories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from perdure.contract.agents import RankStepTimes
from perdure_training.node_api.bodies import DeviceUsage
from perdure_training.node_api.progress_file import StepTimes

_KEPT = 3
"""Measurements of a rank of which the middle one of each part is reported, or the lower one of the first two."""
_CHANGED = 0.05
"""Changes of a rank's computation that are reported, as a share of its step."""
_AGAIN = 60.0
"""Seconds between two reports, at least, unless a change is large."""
_LARGE = 0.1
"""Changes of what a rank computes or waits that are reported at once, as a share of its step: what a slow rank costs
the others at least, and what these wait for it."""
_LARGE_WITHIN = 600.0
"""Seconds in which at most `_MOST_LARGE` changes are reported at once."""
_MOST_LARGE = 3
_NOTHING = StepTimes(0.0, 0.0, 0.0, readings=0)
_MOST_RANKS = 1024
"""Ranks of a job beyond which a node reports only its slowest rank: a job keeps all reports in its state."""


_TOGETHER = 5
"""Measurements that an experiment gets in one report."""


class StepTimesReports:
    """The reports of one node."""

    def __init__(self) -> None:
        self._generation = 0
        self._measured: dict[int, deque[StepTimes]] = {}
        self._reported: dict[int, StepTimes] = {}
        self._reported_at = 0.0
        self._large_at: deque[float] = deque(maxlen=_MOST_LARGE)
        """When large changes were last reported at once."""
        self._computes: dict[int, list[float]] = {}
        """All measurements of each rank in this generation."""
        self._told = 0
        """The number of them that was reported."""

    def follow(
        self,
        times: Mapping[int, StepTimes],
        *,
        generation: int,
        processes: int,
        nodes: int,
        now: float,
        requested: int = 0,
    ) -> tuple[RankStepTimes, ...]:
        """Takes in the newest measurements, and returns what is to be reported now; mostly nothing.

        Args:
            times: The newest measurement of each rank.
            generation: The generation of the ranks.
            processes: The number of the node's ranks.
            nodes: The most nodes that the job has.
            now: Seconds on the monotonic clock.
            requested: The measurements that are reported in any case, all of them each time.
        """
        if generation != self._generation:
            self._generation, self._measured, self._reported = generation, {}, {}
            self._computes, self._told = {}, 0
        for rank, measured in times.items():
            known = self._measured.setdefault(rank, deque(maxlen=_KEPT))
            # The first one has the warm-up of caches and compilers.
            if measured.known and measured.readings > max(1, known[-1].readings if known else 0):
                known.append(measured)
                if requested > len(computes := self._computes.setdefault(rank, [])):
                    computes.append(round(measured.compute, 6))
        usual = {rank: _middle(known) for rank, known in self._measured.items() if len(known) > 1}
        if len(usual) < processes or not self._is_due(usual, requested, now):
            return ()
        self._reported_at, self._told = now, self._measurements
        self._reported = usual
        ranks = [
            RankStepTimes(
                rank=rank,
                compute=measured.compute,
                wait=measured.wait,
                rest=measured.rest,
                computes=tuple(self._computes[rank]),
            )
            for rank, measured in sorted(usual.items())
        ]
        return (max(ranks, key=lambda one: one.compute),) if processes * nodes > _MOST_RANKS else tuple(ranks)

    @property
    def _measurements(self) -> int:
        return min(map(len, self._computes.values()), default=0)

    def _is_due(self, usual: Mapping[int, StepTimes], requested: int, now: float) -> bool:
        if self._told < requested:
            return self._measurements - self._told >= min(_TOGETHER, requested - self._told)
        if not self._reported:
            return True
        compute, wait = self._changes(usual)
        if now - self._reported_at >= _AGAIN:
            return compute > _CHANGED or wait > _LARGE
        if max(compute, wait) <= _LARGE or (
            len(self._large_at) == _MOST_LARGE and now - self._large_at[0] < _LARGE_WITHIN
        ):
            return False
        self._large_at.append(now)
        return True

    def _changes(self, usual: Mapping[int, StepTimes]) -> tuple[float, float]:
        """The largest changes since the last report of what a rank computes and of what it waits, as shares of its
        step."""
        computes, waits = [0.0], [0.0]
        for rank, now in usual.items():
            before, step = self._reported.get(rank, _NOTHING), max(now.compute + now.wait + now.rest, 1e-9)
            computes.append(abs(now.compute - before.compute) / step)
            waits.append(abs(now.wait - before.wait) / step)
        return max(computes), max(waits)


def with_slowed_devices(
    ranks: Sequence[RankStepTimes], devices: Sequence[DeviceUsage], *, base_rank: int, processes: int
) -> tuple[RankStepTimes, ...]:
    """Adds why the clocks of the ranks' GPUs are reduced, if each rank of the node has a GPU of its own."""
    if len(devices) != processes:
        return tuple(ranks)
    return tuple(one.replace(slowed=devices[one.rank - base_rank].slowed) for one in ranks)


def _middle(measured: deque[StepTimes]) -> StepTimes:
    """The middle one of each part: a rank computes as long as before where it waits for another that has become
    slow."""
    middle = (len(measured) - 1) // 2
    compute, wait, rest = (sorted(part)[middle] for part in zip(*(one[:3] for one in measured), strict=True))
    return StepTimes(compute, wait, rest, readings=measured[-1].readings)
