"""What Perdure reads of a GPU, beside what NVIDIA's own program reports of it at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from perdure.base.metrics.machine import GpuMonitor
from perdure_launcher.system.nvml import Devices
from tests.gpu.nvidia import reported
from tests.support.waiting import wait_for

MIB = 1 << 20


@pytest.fixture
def busy() -> Iterator[None]:
    """Keeps the GPU busy, with a gibibyte in use."""
    end = threading.Event()
    kept = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")

    def multiply() -> None:
        factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        while not end.is_set():
            for _ in range(10):
                torch.mm(factor, factor)
            torch.cuda.synchronize()

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        # The driver measures it over up to a second.
        wait_for(lambda: int(reported("utilization.gpu")["utilization.gpu"]) > 90)
        yield
    finally:
        end.set()
        thread.join()
    del kept
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("busy")
def test_the_agents_figures_are_those_of_the_driver(gpu: str) -> None:
    monitor = GpuMonitor()
    expected = reported("name", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu", "power.limit")
    found = {(sample.name, *list(sample.labels.values())[1:]): sample.value for sample in monitor.read()}
    assert found["perdure_gpu_info", gpu] == 1
    assert expected["name"] == gpu
    assert found[("perdure_gpu_memory_total_bytes",)] / MIB == pytest.approx(float(expected["memory.total"]), abs=1)
    assert found[("perdure_gpu_memory_used_bytes",)] / MIB == pytest.approx(float(expected["memory.used"]), abs=64)
    assert found[("perdure_gpu_utilization_ratio",)] * 100 == pytest.approx(float(expected["utilization.gpu"]), abs=20)
    assert found[("perdure_gpu_utilization_ratio",)] > 0.5
    assert found[("perdure_gpu_temperature_celsius",)] == pytest.approx(float(expected["temperature.gpu"]), abs=4)

    def watts() -> tuple[float, float]:
        """The power that the agent reads, and the power that the driver tells."""
        [own] = [sample.value for sample in monitor.read() if sample.name == "perdure_gpu_power_watts"]
        return own, float(reported("power.draw")["power.draw"])

    # It changes by hundreds of watts while the GPU becomes busy, and by a few once it is.
    limit = float(expected["power.limit"])
    own, told = wait_for(lambda: found if abs((found := watts())[0] - found[1]) < 0.02 * limit else None)
    assert limit / 4 < own <= 1.1 * limit, told


@pytest.mark.usefixtures("busy")
def test_power_that_slows_the_gpu_is_told_as_the_driver_tells_it(figures: dict[str, Any]) -> None:
    def slowed() -> tuple[bool, bool]:
        read = (sample for sample in GpuMonitor().read() if sample.name == "perdure_gpu_slowed")
        [own] = [bool(sample.value) for sample in read if sample.labels["reason"] == "power"]
        field = "clocks_event_reasons.sw_power_cap"
        return own, reported(field)[field] == "Active"

    own, _ = wait_for(lambda: found if len(set(found := slowed())) == 1 else None)
    figures["a busy GPU is slowed by its power limit"] = own


def test_the_agents_counters_are_those_of_the_driver() -> None:
    names = {
        "thermal": ("clocks_event_reasons.sw_thermal_slowdown", "clocks_event_reasons.hw_thermal_slowdown"),
        "hardware": ("clocks_event_reasons.hw_slowdown",),
    }
    found = {(sample.name, *list(sample.labels.values())[1:]): sample.value for sample in GpuMonitor().read()}
    for reason, fields in names.items():
        expected = reported(*fields)
        assert found["perdure_gpu_slowed", reason] == any(value == "Active" for value in expected.values())
    for kind in ("corrected", "uncorrected"):
        field = f"ecc.errors.{kind}.volatile.total"
        assert found["perdure_gpu_memory_errors_total", kind] == int(reported(field)[field])


@pytest.mark.usefixtures("busy")
def test_the_launchers_figures_are_those_of_the_driver(gpu: str) -> None:
    devices = Devices()
    assert devices.count == torch.cuda.device_count()
    [found, *_] = devices.usage()
    expected = reported("memory.used", "memory.total", "utilization.gpu", "temperature.gpu")
    assert (found.index, found.name) == (0, gpu)
    assert (found.memory_total_bytes or 0) / MIB == pytest.approx(float(expected["memory.total"]), abs=1)
    assert (found.memory_used_bytes or 0) / MIB == pytest.approx(float(expected["memory.used"]), abs=64)
    assert found.utilization_percent == pytest.approx(float(expected["utilization.gpu"]), abs=20)
    assert found.temperature_celsius == pytest.approx(float(expected["temperature.gpu"]), abs=4)
