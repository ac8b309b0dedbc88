"""Runs one trial: starts a job, waits until it steps, kills, and waits until it steps again; the same for every
system."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from .processes import TrialFailed, eventually, kill
from .records import Composition, Scenario, SystemName, TrialRecord
from .steps import ProcessStart, StepLog, WorldStart, find_world, passed_at

START_TIMEOUT = 180.0
SETTLE_SECONDS = 2.0
"""Seconds between the first steps and the kill, in which elections, keep-alives and caches of all systems settle."""
REPAIR_TIMEOUT = 90.0
"""Seconds for a surviving node to restart its rank; torchrun's agents end the job after 75 s."""
SINGLE_FAULTS = (Scenario.WORKER, Scenario.NODE_REPLACED, Scenario.NODE_LOST)
VICTIM_NODE = 1
"""The node that faults hit. It is not the first one, whose loss torchrun never survives."""


class Job(Protocol):
    """One training job, run by one system."""

    size: int
    """The number of nodes, with one rank each."""

    async def start(self) -> None:
        """Starts the job. Returns before it steps."""
        ...

    def alive(self) -> bool:
        """Returns False if the job has ended and cannot recover any more."""
        ...

    def processes(self, node: int) -> list[psutil.Process]:
        """Returns all processes of one node, including its ranks."""
        ...

    async def forbid_replacement(self) -> None:
        """Prevents new nodes from now on."""
        ...

    async def replace(self, node: int) -> None:
        """Starts a replacement at once if the system does not do that itself."""
        ...

    async def compose(self, killed_at: float) -> Composition:
        """Returns the phases of the recovery that the system itself knows."""
        ...

    async def stop(self) -> None:
        """Ends the job and all its processes."""
        ...


def torchruns(job: Job) -> list[psutil.Process]:
    """Returns the torchrun of every node, for systems that supervise one."""
    found: list[psutil.Process] = []
    for node in range(job.size):
        for process in job.processes(node):
            with suppress(psutil.NoSuchProcess):
                if any(Path(word).name == "torchrun" for word in process.cmdline()[:2]):
                    found.append(process)
    return found


def new_rank(job: Job, node: int, *, without: Collection[int]) -> psutil.Process | None:
    """Returns the rank that a node has restarted: its youngest process without children that runs the script."""
    found: list[tuple[float, psutil.Process]] = []
    for process in job.processes(node):
        with suppress(psutil.NoSuchProcess):
            command = process.cmdline()
            runs = any(Path(word).name == "train.py" for word in command) and "torchrun" not in " ".join(command)
            if runs and process.pid not in without and not process.children():
                found.append((process.create_time(), process))
    return max(found, key=lambda item: item[0])[1] if found else None


async def kill_during_repair(job: Job, *, without: Collection[int]) -> tuple[float, int]:
    """Kills the rank that the first node has restarted, which waits for the lost node's. Returns the time and the
    PID."""
    rank = await eventually(
        lambda: new_rank(job, 0, without=without),
        seconds=REPAIR_TIMEOUT,
        otherwise="the surviving node did not restart its rank",
    )
    return kill([rank]), rank.pid


def victims(job: Job, scenario: Scenario, world: WorldStart) -> list[psutil.Process]:
    """Returns the processes that the scenario kills."""
    if scenario is Scenario.SLOW_TO_DIE:
        return torchruns(job)
    node = job.processes(VICTIM_NODE)
    if scenario is not Scenario.WORKER:
        return node
    return [process for process in node if process.pid in world.pids.values()]


def compose_starts(composition: Composition, starts: list[ProcessStart], world: WorldStart, killed_at: float):
    """Adds the phases that the ranks of the new world recorded about their start."""
    new = [start for start in starts if start.pid in world.pids.values()]
    if not new:
        return composition
    return composition.model_copy(
        update={
            "process_started": max(start.started for start in new) - killed_at,
            "imported": max(start.imported for start in new) - killed_at,
            "grouped": max(start.grouped for start in new) - killed_at,
            "stepped": world.time - killed_at,
        }
    )


async def run_trial(
    job: Job, *, system: SystemName, scenario: Scenario, number: int, folder: Path, timeout_seconds: float
) -> TrialRecord:
    """Runs one trial; a failure of the system is a result, not an exception."""
    record = TrialRecord(system=system, scenario=scenario, number=number, size=job.size, recovered=False)
    log = StepLog(folder)
    try:
        began = time.time()
        await job.start()
        first = await eventually(
            lambda: find_world(log.refresh(), world_size=job.size, after=began, count=10),
            seconds=START_TIMEOUT,
            otherwise="the job did not start stepping",
        )
        record = record.model_copy(update={"start_seconds": first.time - began})
        if scenario is Scenario.NODE_LOST:
            await job.forbid_replacement()
        if scenario is Scenario.SLOW_TO_DIE:
            await eventually(
                lambda: (folder / "ballast").exists() or None,
                seconds=START_TIMEOUT,
                otherwise="the last rank did not get its memory",
            )
        await asyncio.sleep(SETTLE_SECONDS)

        targets = victims(job, scenario, first)
        if not targets:
            raise TrialFailed("there was nothing to kill: the first world had already ended")
        last_step = log.refresh()[-1].step
        killed_at = kill(targets)
        old = set(first.pids.values())
        known = {process.pid for process in job.processes(0)} if scenario is Scenario.RANK_DURING_REPAIR else old
        if scenario in (Scenario.NODE_REPLACED, Scenario.RANK_DURING_REPAIR):
            await job.replace(VICTIM_NODE)
        if scenario is Scenario.RANK_DURING_REPAIR:
            killed_at, also = await kill_during_repair(job, without=known)
            old.add(also)

        def stepping_again() -> WorldStart | None:
            alive = job.alive()
            size = scenario.world_size_after(job.size)
            world = find_world(log.refresh(), world_size=size, after=killed_at, without=old)
            if world is None and not alive:
                raise TrialFailed(f"the job ended, {time.time() - killed_at:.0f} s after the kill")
            return world

        world = await eventually(stepping_again, seconds=timeout_seconds, otherwise="not stepping again")
        passed = await eventually(
            lambda: passed_at(log.refresh(), world, step=last_step),
            seconds=timeout_seconds,
            otherwise=f"stepping again, and not past step {last_step}",
        )
        # The job may report two faults as one incident, whose times count from the first.
        told = await job.compose(killed_at) if scenario in SINGLE_FAULTS else Composition()
        composition = compose_starts(told, log.starts(), world, killed_at)
        return record.model_copy(
            update={
                "recovered": True,
                "seconds": world.time - killed_at,
                "steps_redone": max(0, last_step + 1 - world.first_step),
                "caught_up_seconds": passed - killed_at,
                "composition": composition,
            }
        )
    except TrialFailed as failed:
        return record.model_copy(update={"error": str(failed)})
    finally:
        await job.stop()
