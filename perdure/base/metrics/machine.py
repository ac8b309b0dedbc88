"""Reads the machine: processors, memory, disks and clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from perdure.base.metrics.samples import Sample

_CLOCK_STEP: Final = 1.0
"""Seconds by which a clock must differ from the monotonic one to have been set; NTP slews it by less than a
millisecond a second."""
_SHORTEST: Final = 0.5
"""Seconds of all processors over which their use is measured, at least."""


class HostMonitor:
    """Reads the health of this machine."""

    name = "host"

    def __init__(
        self,
        folders: Mapping[str, Path],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the monitor.

        Args:
            folders: Folders whose free space counts, by the value of the label `folder`.
            clock: The machine's clock.
            monotonic: A clock that is never set.
        """
        self._folders = dict(folders)
        self._clock = clock
        self._monotonic = monotonic
        self._offset = clock() - monotonic()
        self._clock_steps = 0
        self._processors = _processor_seconds()

    def read(self) -> Sequence[Sample]:
        """Returns what psutil reports; what it does not report on this system is left out."""
        offset = self._clock() - self._monotonic()
        if abs(offset - self._offset) > _CLOCK_STEP:
            self._clock_steps += 1
        self._offset = offset
        memory = psutil.virtual_memory()
        samples = [
            Sample("perdure_host_load1", psutil.getloadavg()[0]),
            Sample("perdure_host_memory_total_bytes", memory.total),
            Sample("perdure_host_memory_available_bytes", memory.available),
            Sample("perdure_host_clock_steps_total", self._clock_steps),
        ]
        # Not `psutil.cpu_percent`: all monitors of a process would share when it last looked.
        (busy, total), (busy_before, total_before) = _processor_seconds(), self._processors
        if total - total_before >= _SHORTEST:
            self._processors = busy, total
            share = (busy - busy_before) / (total - total_before)
            samples.append(Sample("perdure_host_cpu_ratio", min(max(share, 0.0), 1.0)))
        for label, folder in self._folders.items():
            try:
                free = psutil.disk_usage(str(folder)).free
            except OSError:
                continue
            samples.append(Sample("perdure_host_disk_free_bytes", free, {"folder": label}))
        return samples


def _processor_seconds() -> tuple[float, float]:
    """Returns the seconds for which all processors have worked, and those that have passed for them."""
    times = psutil.cpu_times()._asdict()
    # Linux counts the time of guests as that of users as well.
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return total - times["idle"] - times.get("iowait", 0.0), total
