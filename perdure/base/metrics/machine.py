"""Reads the machine: processors, memory, disks and clock by psutil, GPUs by NVIDIA's library."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import psutil

from perdure.base.metrics.samples import Sample

logger = logging.getLogger(__name__)

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


_MEMORY_VERSION: Final = 40 | 2 << 24
"""`nvmlMemory_v2`: what the driver reserves for itself is not used, as in `nvidia-smi`."""
_REASONS: Final[Mapping[str, int]] = {
    "thermal": 0x20 | 0x40,  # software and hardware thermal slowdown
    "power": 0x04 | 0x80,  # power cap, power brake
    "hardware": 0x08,  # hardware slowdown, for any of its reasons
}
"""Bits of NVML's `nvmlClocksEventReasons`, by the value of the label `reason`."""


class GpuMonitor:
    """Reads this machine's GPUs through NVIDIA's library, where the process can reach it; else there are none.

    In a pod the GPUs belong to the training's container, and the agent gets their figures from the launcher.
    """

    name = "gpu"

    def __init__(self, library: ModuleType | None = None) -> None:
        """Creates the monitor; the library is loaded by the first reading, which may take seconds.

        Args:
            library: A module with the functions of `pynvml`; by default that one.
        """
        self._given = library
        self._library: Any = None
        self._handles: list[Any] | None = None

    def read(self) -> Sequence[Sample]:
        """Returns what the driver reports of each GPU; what it does not report is left out."""
        samples: list[Sample] = []
        for index, handle in enumerate(self._found()):
            samples += self._device(str(index), handle)
        return samples

    def _found(self) -> list[Any]:
        if self._handles is None:
            self._handles = []
            try:
                library: Any = self._given or _pynvml()
                library.nvmlInit()
                count = library.nvmlDeviceGetCount()
                self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
                self._library = library
            except Exception as error:
                # A machine without a driver, the usual case.
                logger.debug("no GPUs are read: %s", error)
        return self._handles

    def _device(self, gpu: str, handle: Any) -> list[Sample]:
        labels, samples = {"gpu": gpu}, list[Sample]()

        def add(name: str, value: float | None, **more: str) -> None:
            if value is not None:
                samples.append(Sample(name, value, {**labels, **more}))

        product = self._ask("nvmlDeviceGetName", handle)
        if product is not None:
            add("perdure_gpu_info", 1, product=product.decode() if isinstance(product, bytes) else str(product))
        used = self._ask("nvmlDeviceGetUtilizationRates", handle)
        add("perdure_gpu_utilization_ratio", None if used is None else used.gpu / 100)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_VERSION)
        if memory is not None:
            add("perdure_gpu_memory_used_bytes", memory.used)
            add("perdure_gpu_memory_total_bytes", memory.total)
        add("perdure_gpu_temperature_celsius", self._ask("nvmlDeviceGetTemperature", handle, 0))
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        add("perdure_gpu_power_watts", None if power is None else power / 1000)
        slowed = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if slowed is not None:
            for reason, bits in _REASONS.items():
                add("perdure_gpu_slowed", float(bool(slowed & bits)), reason=reason)
        for kind, number in (("corrected", 0), ("uncorrected", 1)):
            # 0: since the driver was loaded.
            add(
                "perdure_gpu_memory_errors_total",
                self._ask("nvmlDeviceGetTotalEccErrors", handle, number, 0),
                kind=kind,
            )
        return samples

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except Exception:
            # Each GPU and driver reports other things.
            return None


def _pynvml() -> ModuleType:
    # Importing it takes megabytes, which no process should need on a machine without a driver.
    ctypes.CDLL("libnvidia-ml.so.1")
    import pynvml

    return cast("ModuleType", pynvml)
