"""Tests of the most that a node has used of its machine, as its agent keeps it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.peaks import Machine, PeakMeter
from perdure.agent.progress import ProgressReader
from perdure.agent.telemetry import Telemetry
from perdure.contract import Peaks
from perdure.contract.peaks import MOST_BYTES, MOST_CORES, join_peaks
from perdure_training.node_api.bodies import DeviceUsage, UsageReport
from perdure_training.node_api.progress_file import COUNTED, ProgressFile, progress_path
from tests.agent.bench import Bench

GI = 2**30
MACHINE = Machine(memory=64 * GI, cores=16.0)


def meter(known: Peaks | None = None) -> PeakMeter:
    return PeakMeter(known, keep=lambda peaks: None, machine=MACHINE)


def watch(found: PeakMeter, cores: list[float], *, every: float = 10.0, start: float = 1_000.0) -> Peaks:
    for index, used in enumerate(cores):
        found.add(UsageReport(cpu_cores=used, memory_bytes=GI), start + index * every)
    assert found.newest is not None
    return found.newest


def test_memory_is_the_most_that_was_seen():
    found = meter()
    for now, memory in enumerate((3, 7, 5)):
        found.add(UsageReport(memory_bytes=memory * GI, working_set_bytes=(memory - 1) * GI), 10.0 * now)
    assert found.newest == Peaks(watched=20.0, memory=7 * GI, memory_total=64 * GI)


def test_what_the_container_is_charged_counts_where_it_is_more():
    found = meter()
    found.add(UsageReport(memory_bytes=3 * GI, working_set_bytes=9 * GI, memory_limit_bytes=10 * GI), 0.0)
    assert found.newest is not None
    assert (found.newest.memory, found.newest.memory_total) == (9 * GI, 10 * GI)


def test_processors_are_a_mean_over_a_minute():
    assert watch(meter(), [0, 16, 16, 2, 2, 2, 2]).cpu == pytest.approx(40 / 6)
    assert watch(meter(), [4.0] * 20).cpu == pytest.approx(4.0)


def test_a_short_burst_of_processors_is_no_sustained_use():
    found = watch(meter(), [2.0] * 10 + [14.0] + [2.0] * 10)
    assert found.cpu == pytest.approx(4.0)


def test_before_a_minute_is_over_the_use_of_processors_is_not_known():
    assert watch(meter(), [4.0] * 6).cpu is None


def test_a_pause_of_the_launcher_is_not_measured():
    found = meter()
    watch(found, [4.0] * 4)
    peaks = watch(found, [4.0] * 4, start=9_000.0)
    assert peaks.cpu is None
    assert peaks.watched == 3 * 10 + 60 + 3 * 10, "of the pause no more than a minute counts"


def test_the_fullest_gpu_counts():
    devices = tuple(
        DeviceUsage(index=number, memory_used_bytes=used * GI, memory_total_bytes=80 * GI)
        for number, used in enumerate((20, 61, 40))
    )
    found = meter()
    found.add(UsageReport(devices=devices), 0.0)
    assert found.newest is not None
    assert (found.newest.gpu_memory, found.newest.gpu_memory_total) == (61 * GI, 80 * GI)


@pytest.mark.parametrize(
    "lie",
    [
        {"memory_bytes": 2**80, "working_set_bytes": 2**70, "shm_bytes": 2**90},
        {"memory_bytes": -5, "cpu_cores": -1.0},
        {"cpu_cores": float("nan")},
        {"cpu_cores": float("inf"), "memory_limit_bytes": 2**80},
        {"cpu_cores": 1e12},
        {"devices": (DeviceUsage(index=0, memory_used_bytes=2**80, memory_total_bytes=2**79),)},
    ],
)
def test_no_figure_counts_beyond_what_the_machine_has(lie: dict[str, Any]):
    found = meter()
    for number in range(8):
        found.add(UsageReport(**lie), 10.0 * number)
    peaks = found.newest
    assert peaks is not None
    assert 0 <= (peaks.memory or 0) <= MACHINE.memory
    assert 0 <= (peaks.shm or 0) <= MACHINE.memory
    assert 0 <= (peaks.memory_total or 0) <= MACHINE.memory
    assert 0 <= (peaks.cpu or 0) <= MACHINE.cores
    assert (peaks.gpu_memory or 0) <= 2**40


def test_a_message_with_absurd_figures_is_read_with_the_largest_possible_ones():
    found = Peaks.model_validate({"watched": 1e300, "memory": 2**90, "cpu": float("inf"), "shm": -7})
    assert (found.memory, found.cpu, found.shm) == (MOST_BYTES, MOST_CORES, 0)
    assert Peaks.model_validate({"cpu": float("nan")}).cpu == 0.0


def test_peaks_are_joined_by_the_most_of_each():
    one, other = Peaks(watched=10, memory=5, cpu=1.0), Peaks(watched=30, memory=3, gpu_memory=9)
    assert join_peaks((one, None, other)) == Peaks(watched=30, memory=5, cpu=1.0, gpu_memory=9)
    assert join_peaks((None,)) is None


def test_the_next_agent_of_a_node_continues_with_the_peaks_of_the_one_before(tmp_path: Path):
    first = Bench(tmp_path)
    Telemetry(first.node, ProgressReader(tmp_path), to_group=first.group).usage(UsageReport(memory_bytes=10**9))
    again = Bench(tmp_path)
    ranks = ProgressReader(tmp_path)
    telemetry = Telemetry(again.node, ranks, to_group=again.group)
    assert ranks.peaks is not None
    assert ranks.peaks.memory == 10**9
    telemetry.usage(UsageReport(memory_bytes=10**8))
    assert ranks.peaks.memory == 10**9


def test_progress_carries_the_peaks(tmp_path: Path):
    bench = Bench(tmp_path)
    ranks = ProgressReader(tmp_path)
    Telemetry(bench.node, ranks, to_group=bench.group).usage(UsageReport(memory_bytes=10**9))
    file = ProgressFile(progress_path(tmp_path / "progress", 0), generation=1, pid=1, source=COUNTED)
    file.write(3, time=time.time())
    ranks.sample(generation=1, base_rank=0, processes=1, now=1.0)
    assert ranks.newest is not None
    assert ranks.newest.peaks is not None
    assert ranks.newest.peaks.memory == 10**9


def test_the_lease_tells_the_peaks_before_a_rank_has_made_a_step(tmp_path: Path):
    bench = Bench(tmp_path)
    telemetry = Telemetry(bench.node, ProgressReader(tmp_path), to_group=bench.group)
    assert telemetry.view(1).peaks is None
    telemetry.usage(UsageReport(memory_bytes=10**9))
    view = telemetry.view(1)
    assert (view.progress, view.peaks and view.peaks.memory) == (None, 10**9)
