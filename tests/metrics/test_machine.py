"""Tests of what is read of the machine, with drivers that lie, raise and hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from perdure.base.metrics.machine import GpuMonitor, HostMonitor
from perdure.base.metrics.monitors import Reading
from perdure.base.metrics.samples import Sample
from perdure.base.metrics.table import METRICS
from tests.support.waiting import DEADLINE


def values(samples: Sequence[Sample]) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_the_host_is_read(tmp_path: Path) -> None:
    found = values(HostMonitor({"run": tmp_path, "shm": tmp_path / "missing"}).read())
    assert 0 < found[("perdure_host_memory_available_bytes",)] < found[("perdure_host_memory_total_bytes",)]
    assert found["perdure_host_disk_free_bytes", "run"] > 0
    assert ("perdure_host_disk_free_bytes", "shm") not in found
    assert found[("perdure_host_clock_steps_total",)] == 0


def test_each_monitor_measures_processors_since_it_last_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"user": 100.0, "system": 10.0, "idle": 300.0, "iowait": 40.0, "guest": 60.0, "guest_nice": 0.0}
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(_asdict=lambda: dict(now)))
    first, second = HostMonitor({}), HostMonitor({})

    def share(monitor: HostMonitor) -> float | None:
        return values(monitor.read()).get(("perdure_host_cpu_ratio",))

    assert share(first) is None
    now["user"], now["guest"], now["idle"] = 101.0, 61.0, 303.0
    assert share(first) == 0.25
    now["system"] = 14.0
    assert (share(first), share(second)) == (1.0, 5 / 8)


def test_a_clock_that_jumps_back_is_counted_once(tmp_path: Path) -> None:
    now = [1_000_000.0, 50.0]
    monitor = HostMonitor({"run": tmp_path}, clock=lambda: now[0], monotonic=lambda: now[1])

    def steps() -> float:
        return values(monitor.read())[("perdure_host_clock_steps_total",)]

    now[:] = [1_000_010.0, 60.0]
    assert steps() == 0
    now[:] = [1_000_020.0 - 3600, 70.0]
    assert [steps(), steps()] == [1, 1]


class Driver:
    """A stand-in of pynvml with two GPUs, of which one reports little."""

    def __getattr__(self, name: str) -> Any:
        def missing(*_: Any) -> Any:
            raise RuntimeError(f"{name}: not supported")

        return missing

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H100"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if handle:
            raise RuntimeError("lost")
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 0x40 | 0x01

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, since: int) -> int:  # noqa: N802
        return (5, 1)[kind]


def test_gpus_are_read_as_far_as_their_driver_reports_them() -> None:
    found = values(GpuMonitor(cast("Any", Driver())).read())
    assert found["perdure_gpu_info", "0", "NVIDIA H100"] == 1
    assert found["perdure_gpu_utilization_ratio", "0"] == 0.97
    assert ("perdure_gpu_utilization_ratio", "1") not in found
    assert found["perdure_gpu_slowed", "0", "thermal"] == 1
    assert found["perdure_gpu_slowed", "0", "power"] == 0
    assert found["perdure_gpu_memory_errors_total", "1", "uncorrected"] == 1
    assert all(name in METRICS for name, *_ in found)


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    assert list(GpuMonitor(cast("Any", SimpleNamespace())).read()) == []


async def test_a_monitor_that_hangs_or_raises_delays_no_other() -> None:
    release, entered = threading.Event(), []

    class Hanging:
        name = "hanging"

        def read(self) -> Sequence[Sample]:
            entered.append(1)
            release.wait()
            return [Sample("perdure_jobs", 1)]

    class Raising:
        name = "raising"

        def read(self) -> Sequence[Sample]:
            raise RuntimeError("no answer")

    hanging = Reading(Hanging())
    try:
        async with asyncio.timeout(DEADLINE):
            assert await hanging.samples(timedelta(milliseconds=50)) == ()
            assert await hanging.samples(timedelta(hours=1)) == ()
            assert await Reading(Raising()).samples() == ()
    finally:
        release.set()
    assert entered == [1]
