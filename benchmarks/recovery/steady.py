"""Measures the cost of the control plane while a job trains undisturbed."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from pathlib import Path

import psutil

import perdure_launcher
from perdure import agent
from perdure.contract.names import job_workflow_id
from perdure_launcher.warm_start.names import LISTENING_VARIABLE

from .perdure_job import ControlPlane, PerdureJob
from .processes import eventually
from .records import Scenario
from .steps import StepLog, find_world
from .summary import Steady, SteadyCost
from .trial import START_TIMEOUT

SETTLE_SECONDS = 60.0
"""Seconds to wait before the measurement: imports, first polls and first metrics belong to the start, and half a minute
after the first steps each node reports once how it spends their time."""
MEGABYTE = 1e6


def role_of(process: psutil.Process) -> str | None:
    """Returns the role of a process among Perdure's own in a node; None for the user's."""
    if is_warm_interpreter(process):
        return "warm interpreter"
    words = process.cmdline()
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1]
        return {agent.__name__: "agent", perdure_launcher.__name__: "launcher"}.get(module)
    if any(perdure_launcher.__name__ in word for word in words[:4]):
        return "launcher"
    return None


def is_warm_interpreter(process: psutil.Process) -> bool:
    """Returns whether this is the warm interpreter; its forks, the ranks, show the same environment."""
    parent = process.parent()
    return LISTENING_VARIABLE in process.environ() and (parent is None or LISTENING_VARIABLE not in parent.environ())


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def history_length(plane: ControlPlane, name: str) -> int:
    temporal = await plane.client.connect()
    description = await temporal.get_workflow_handle(job_workflow_id("default", name)).describe()
    return description.history_length


async def measure_steady(plane: ControlPlane, *, seconds: float) -> Steady:
    """Runs one job of two nodes undisturbed, and measures the usage of each of Perdure's processes."""
    with tempfile.TemporaryDirectory(prefix="pb-steady-") as folder:
        job = PerdureJob(Scenario.WORKER, Path(folder), plane, name=f"steady-{secrets.token_hex(3)}")
        log = StepLog(Path(folder))
        try:
            began = time.time()
            await job.start()
            await eventually(
                lambda: find_world(log.refresh(), world_size=2, after=began),
                seconds=START_TIMEOUT,
                otherwise="the job did not start stepping",
            )
            await asyncio.sleep(SETTLE_SECONDS)
            groups: dict[str, list[psutil.Process]] = {
                "agent": [],
                "launcher": [],
                "warm interpreter": [],
                "worker": [psutil.Process(plane.worker.pid)],
                "server": [psutil.Process(plane.server.pid)],
            }
            for process in (*job.processes(0), *job.processes(1)):
                if role := role_of(process):
                    groups[role].append(process)
            events_before = await history_length(plane, job.name)
            started = time.monotonic()
            before = {process: cpu_seconds(process) for group in groups.values() for process in group}
            await asyncio.sleep(seconds)
            elapsed = time.monotonic() - started
            used = {process: cpu_seconds(process) - at_first for process, at_first in before.items()}
            events = await history_length(plane, job.name) - events_before
            return Steady(
                seconds=elapsed,
                costs=tuple(
                    SteadyCost(
                        what=what,
                        processes=len(group),
                        cpu_percent=100 * sum(used[process] for process in group) / elapsed / len(group),
                        rss_mb=sum(process.memory_info().rss for process in group) / len(group) / MEGABYTE,
                        private_mb=sum(process.memory_full_info().uss for process in group) / len(group) / MEGABYTE,
                    )
                    for what, group in groups.items()
                    if group
                ),
                job_events_per_minute=60 * events / elapsed,
                job_events_before=events_before,
            )
        finally:
            await job.stop()
