"""Keeps the most that the node has used of its machine, from the launcher's reports.

The launcher runs beside the training code, so no figure counts beyond what the machine has.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from perdure.contract.peaks import Peaks, join_peaks
from perdure_training.node_api.bodies import UsageReport

_MINUTE: Final = 60.0
"""Seconds over which the use of processors is averaged: a request is what a node needs all the time."""
_LONGEST_GAP: Final = 60.0
"""Seconds between two reports that count as measured."""
_KEPT_EVERY: Final = 60.0
"""Seconds between two writes of the peaks: what an agent that is killed has not written is seen again, mostly."""
_LARGEST_DEVICE: Final = 2**40
"""Bytes of one GPU's memory."""


@dataclass(frozen=True)
class Machine:
    """What there is to be used."""

    memory: int
    cores: float

    @classmethod
    def here(cls) -> Machine:
        """Returns the machine of this process. A container sees all of it."""
        return cls(memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cores=float(os.cpu_count() or 1))


class PeakMeter:
    """The peaks of one node."""

    def __init__(self, known: Peaks | None, *, keep: Callable[[Peaks], object], machine: Machine | None = None) -> None:
        """Creates the meter.

        Args:
            known: What an earlier agent of the node has kept.
            keep: Writes the peaks where the next agent finds them.
            machine: What there is to be used; by default this machine.
        """
        self.newest = known
        self._keep = keep
        self._kept_at = -math.inf
        self._machine = machine or Machine.here()
        self._cores: deque[tuple[float, float]] = deque()
        """Times of reports in the last minute, each with the processors used since the one before."""
        self._heard_at: float | None = None

    def add(self, usage: UsageReport, now: float) -> None:
        """Takes in a report; `now` is on the monotonic clock."""
        gap = now - self._heard_at if self._heard_at is not None else 0.0
        self._heard_at = now
        watched = (self.newest.watched if self.newest is not None else 0.0) + min(gap, _LONGEST_GAP)
        most = self._machine.memory
        limit = _bounded(usage.memory_limit_bytes, most)
        found = Peaks(
            watched=watched,
            memory=_bounded(_larger(usage.memory_bytes, usage.working_set_bytes), most if limit is None else limit),
            memory_total=most if limit is None else limit,
            cpu=self._sustained(usage.cpu_cores, gap, now),
            shm=_bounded(usage.shm_bytes, most),
            **_fullest_device(usage),
        )
        self.newest = join_peaks((self.newest, found))
        if self.newest is not None and now - self._kept_at >= _KEPT_EVERY:
            self._kept_at = now
            self._keep(self.newest)

    def _sustained(self, cores: float | None, gap: float, now: float) -> float | None:
        """Returns the processors used over the last minute; None before it is over, or after a gap."""
        if gap <= 0 or gap > _LONGEST_GAP or cores is None or not math.isfinite(cores):
            self._cores.clear()
            self._cores.append((now, 0.0))
            return None
        self._cores.append((now, min(max(cores, 0.0), self._machine.cores)))
        while len(self._cores) > 2 and now - self._cores[1][0] >= _MINUTE:
            self._cores.popleft()
        span = now - self._cores[0][0]
        if span < _MINUTE:
            return None
        return sum(mean * (time - before) for (before, _), (time, mean) in pairwise(self._cores)) / span


def _larger(*numbers: int | None) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _bounded(number: int | None, most: int) -> int | None:
    return None if number is None else min(max(number, 0), most)


def _fullest_device(usage: UsageReport) -> dict[str, int | None]:
    known = [(one.memory_used_bytes, one.memory_total_bytes) for one in usage.devices if one.memory_used_bytes]
    if not known:
        return {}
    used, total = max((used or 0, total or 0) for used, total in known)
    total = min(total, _LARGEST_DEVICE)
    return {"gpu_memory": _bounded(used, total or _LARGEST_DEVICE), "gpu_memory_total": total or None}
