"""Tests of reading the kernel, the memory controller and the GPU driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perdure_launcher.system.cgroups import MemoryController
from perdure_launcher.system.nvml import Devices
from perdure_launcher.system.processes import all_processes, descendants, environment_of, read_process, resident_bytes
from perdure_launcher.system.usage import UsageMeter, processes_per_node
from perdure_launcher.unmanaged_training.in_node import ProcessScanner
from tests.support.nvml import compiled_driver
from tests.support.waiting import wait_for


def test_this_process_is_read_as_the_kernel_has_it() -> None:
    own = read_process(os.getpid())
    assert own
    assert (own.parent, own.group, own.zombie) == (os.getppid(), os.getpgrp(), False)
    assert own.pid in {process.pid for process in all_processes()}
    total, shared = resident_bytes(os.getpid())
    assert total > shared > 0
    assert environment_of(os.getpid()).get("PATH") == os.environ["PATH"]


def test_a_process_that_is_gone_is_nothing() -> None:
    assert read_process(2**22 + 1) is None
    assert environment_of(2**22 + 1) == {}
    assert resident_bytes(2**22 + 1) == (0, 0)


def test_names_with_spaces_and_parentheses_do_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    child = subprocess.Popen([program, "100"])
    try:
        found = read_process(child.pid)
        assert found
        assert found.parent == os.getpid()
        assert child.pid in {process.pid for process in descendants()}
    finally:
        child.kill()
        child.wait()


def test_cgroup_version_2(tmp_path: Path) -> None:
    root, group = tmp_path / "cgroup", tmp_path / "cgroup" / "pod" / "container"
    group.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "membership").write_text("0::/pod/container\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("2000000\n")
    (group.parent / "memory.current").write_text("1500000\n")
    (group.parent / "memory.stat").write_text("file 700000\ninactive_file 400000\nactive_file 300000\n")
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    controller = MemoryController(root, tmp_path / "membership")
    assert (controller.limit_bytes, controller.out_of_memory_kills) == (2_000_000, 2)
    assert controller.free_bytes == 900_000


def test_cgroup_version_1_and_a_path_that_is_the_hosts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (root / "memory").mkdir(parents=True)
    (tmp_path / "membership").write_text("5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    (root / "memory" / "memory.limit_in_bytes").write_text("1000000\n")
    (root / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    controller = MemoryController(root, tmp_path / "membership")
    assert (controller.limit_bytes, controller.out_of_memory_kills) == (1_000_000, 7)


def test_no_memory_controller_at_all(tmp_path: Path) -> None:
    controller = MemoryController(tmp_path / "none", tmp_path / "none")
    assert (controller.limit_bytes, controller.out_of_memory_kills) == (None, 0)


def test_gpus_are_read_through_the_drivers_library(tmp_path: Path) -> None:
    devices = Devices(str(compiled_driver(tmp_path)))
    assert devices.count == 2
    first, second = devices.usage()
    assert (first.index, first.name, first.utilization_percent) == (0, "NVIDIA H100", 97.0)
    assert (first.memory_used_bytes, first.memory_total_bytes, first.temperature_celsius) == (
        1000,
        80_000_000_000,
        61.0,
    )
    assert (second.memory_used_bytes, second.temperature_celsius) == (1001, None)
    assert processes_per_node(None, devices, {}) == 2
    assert processes_per_node(None, devices, {"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert processes_per_node(None, devices, {"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert processes_per_node(5, devices, {}) == 5


@pytest.mark.parametrize(("reasons", "slowed"), [(0x1, ""), (0x4, "power"), (0x40 | 0x4, "thermal"), (0x8, "hardware")])
def test_why_the_clocks_of_a_gpu_are_reduced_is_read(tmp_path: Path, reasons: int, slowed: str) -> None:
    devices = Devices(str(compiled_driver(tmp_path, reasons=reasons)))
    assert [device.slowed for device in devices.usage()] == ["", slowed]


@pytest.mark.parametrize("kind", ["missing", "driverless", "not a driver"])
def test_nodes_without_gpus_have_none(tmp_path: Path, kind: str) -> None:
    library = {
        "missing": lambda: str(tmp_path / "libnvidia-ml.so.1"),
        "driverless": lambda: str(compiled_driver(tmp_path, init=9)),
        "not a driver": lambda: "libc.so.6",
    }[kind]()
    devices = Devices(library)
    assert (devices.count, devices.usage(), processes_per_node(None, devices, {})) == (0, [], 1)


def test_usage_counts_only_what_is_below_and_only_since_the_last_reading(tmp_path: Path) -> None:
    meter = UsageMeter(memory=MemoryController(tmp_path, tmp_path), devices=Devices(str(tmp_path / "none")))
    assert meter.read().cpu_cores is None
    child = subprocess.Popen(
        [sys.executable, "-c", "data = bytearray(30_000_000); print('up', flush=True)\nwhile True: pass"],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout
        child.stdout.readline()
        reading = meter.read()
        while not reading.cpu_cores:
            reading = meter.read()
        assert (reading.memory_bytes or 0) > 30_000_000
        assert reading.memory_limit_bytes is None
    finally:
        child.kill()
        child.wait()


def test_what_processes_wait_for_a_processor_is_measured(tmp_path: Path) -> None:
    meter = UsageMeter(memory=MemoryController(tmp_path, tmp_path), devices=Devices(str(tmp_path / "none")))
    processor = min(os.sched_getaffinity(0))
    burn = f"import os; os.sched_setaffinity(0, [{processor}])\nwhile True: pass"
    children = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(3)]
    try:
        assert meter.read().cpu_wait_cores is None
        # Of three that share one processor, two wait at any time.
        wait_for(lambda: (meter.read().cpu_wait_cores or 0) > 1)
    finally:
        for child in children:
            child.kill()
            child.wait()


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
ALONE = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("torchrun", "environment", "inherited", "unprotected"),
    [
        (True, PLACE, {}, True),
        (True, {**PLACE, "PERDURE_GENERATION": "3"}, {}, False),
        (True, {"RANK": "0", "WORLD_SIZE": "2"}, {}, False),
        (True, PLACE, PLACE, False),
        (True, {**PLACE, "RANK": "1"}, PLACE, True),
        (False, {**PLACE, "PERDURE_GENERATION": "3"}, {}, False),
        (False, {**PLACE, **ALONE, "PERDURE_GENERATION": "3"}, {}, True),
        (False, {**PLACE, **ALONE, "GROUP_WORLD_SIZE": "2"}, {}, False),
    ],
)
def test_ranks_without_a_place_are_found(
    torchrun: bool, environment: dict[str, str], inherited: dict[str, str], unprotected: bool
) -> None:
    scanner = ProcessScanner(torchrun=torchrun, several=True, environment=inherited)
    # Python's resource tracker lives on with the environment of the test that first needed it.
    while scanner.scan() is not None:
        pass
    child = subprocess.Popen(["sleep", "100"], env={"PATH": os.environ["PATH"], **environment})
    try:
        # Linux shows an empty environment for a moment after a process replaced its program.
        wait_for(lambda: environment_of(child.pid), what="an environment")
        assert (bypass := scanner.scan()) is None or bypass.processes == [child.pid]
        assert (bypass is not None) == unprotected
        for _ in range(5):
            bypass = scanner.scan()
        assert bypass is None, "a process is not looked at indefinitely"
    finally:
        child.kill()
        child.wait()
