"""Reads GPUs through NVIDIA's own library if the node has it; nothing is installed, and a missing library is no
error."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any

from perdure_training.node_api.bodies import DeviceUsage

LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_TEMPERATURE_GPU = 0
_SLOWED = (
    ("thermal", 0x20 | 0x40),  # software and hardware thermal slowdown
    ("hardware", 0x08),  # hardware slowdown, for any of its reasons
    ("power", 0x04 | 0x80),  # power cap, power brake
)
"""Bits of NVML's `nvmlClocksEventReasons` for reduced clocks; a reason that something is wrong comes first."""


class _Memory(ctypes.Structure):
    """The second version, in which what the driver reserves for itself is not used."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Devices:
    """The node's GPUs; empty if the library or its driver is missing.

    The library is loaded at the first use: initializing a driver can take seconds, which no process should wait for
    without need.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library

    @property
    def count(self) -> int:
        return len(self._handles)

    def usage(self) -> list[DeviceUsage]:
        return [self._device(index, handle) for index, handle in enumerate(self._handles)]

    @cached_property
    def _library(self) -> ctypes.CDLL | None:
        return _load(self._name)

    @cached_property
    def _handles(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if not self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return []
        handles: list[ctypes.c_void_p] = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)):
                handles.append(handle)
        return handles

    def _device(self, index: int, handle: ctypes.c_void_p) -> DeviceUsage:
        name = ctypes.create_string_buffer(_NAME_BYTES)
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        utilization, temperature = _Utilization(), ctypes.c_uint()
        named = self._ask("nvmlDeviceGetName", handle, name, ctypes.c_uint(_NAME_BYTES))
        measured = self._ask("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
        used = self._ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(utilization))
        warm = self._ask("nvmlDeviceGetTemperature", handle, ctypes.c_uint(_TEMPERATURE_GPU), ctypes.byref(temperature))
        reasons = ctypes.c_ulonglong()
        told = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
        slowed = (reason for reason, bits in _SLOWED if told and reasons.value & bits)
        return DeviceUsage(
            index=index,
            name=name.value.decode(errors="replace") if named else "",
            utilization_percent=float(utilization.gpu) if used else None,
            memory_used_bytes=int(memory.used) if measured else None,
            memory_total_bytes=int(memory.total) if measured else None,
            temperature_celsius=float(temperature.value) if warm else None,
            slowed=next(slowed, ""),
        )

    def _ask(self, function: str, *arguments: Any) -> bool:
        if self._library is None:
            return False
        call: Callable[..., int] | None = getattr(self._library, function, None)
        return call is not None and call(*arguments) == 0


def _load(library: str) -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(library)
        return loaded if loaded.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
