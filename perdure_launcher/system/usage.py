"""Measures the resource usage of the training. The launcher does this, because an agent in another container would see
only itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TypeAlias

from perdure_training.node_api.bodies import UsageReport

from . import processes
from .cgroups import MemoryController
from .nvml import Devices

_SHARED_MEMORY = "/dev/shm"

_Counts: TypeAlias = dict[tuple[int, ...], int]
"""What each process or thread has counted since its start, by what identifies it."""


class UsageMeter:
    """Measures CPU, memory and GPUs of all processes below the launcher."""

    def __init__(self, *, memory: MemoryController, devices: Devices) -> None:
        self._memory = memory
        self._devices = devices
        self._ticks: _Counts = {}
        self._waited: _Counts = {}
        self._read_at: float | None = None

    def read(self) -> UsageReport:
        """Returns the usage since the last call; the first call has no CPU usage yet."""
        alive = [process for process in processes.descendants() if not process.zombie]
        now = time.monotonic()
        ticks: _Counts = {(process.pid, process.start_ticks): process.cpu_ticks for process in alive}
        waited: _Counts = {
            (process.pid, process.start_ticks, thread): count
            for process in alive
            for thread, count in processes.waited_ns(process.pid).items()
        }
        cpu_cores: float | None = None
        cpu_wait_cores: float | None = None
        if self._read_at is not None and now > self._read_at:
            cpu_cores = _growth(self._ticks, ticks) / processes.TICKS_PER_SECOND / (now - self._read_at)
            if waited:
                cpu_wait_cores = _growth(self._waited, waited) / 1e9 / (now - self._read_at)
        self._ticks, self._waited, self._read_at = ticks, waited, now
        resident = [processes.resident_bytes(process.pid) for process in alive]
        return UsageReport(
            cpu_cores=cpu_cores,
            cpu_wait_cores=cpu_wait_cores,
            # Ranks share mapped libraries, which use memory once: the largest shared part is counted for all of them.
            memory_bytes=sum(total - shared for total, shared in resident)
            + max((shared for _, shared in resident), default=0),
            memory_limit_bytes=self._memory.limit_bytes,
            devices=tuple(self._devices.usage()),
            working_set_bytes=self._memory.working_set_bytes,
            shm_bytes=_used_of(_SHARED_MEMORY) if self._memory.limit_bytes is not None else None,
        )


def _used_of(folder: str) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _growth(before: _Counts, counts: _Counts) -> int:
    return sum(count - before.get(key, 0) for key, count in counts.items())


def processes_per_node(configured: int | None, devices: Devices, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of ranks per node: as configured, else one per GPU that the command may see, else one."""
    if configured is not None:
        return configured
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = devices.count
    if count and visible is not None:
        count = min(count, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    return max(1, count)
