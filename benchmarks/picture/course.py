"""Runs one job under faults at fixed times, and records its steps; the same for every system.

As a program it runs one job of a peer, so that it can have its own PID namespace, and prints the record as JSON.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import psutil
from pydantic import BaseModel

from benchmarks.recovery.peers import DLRoverJob, TorchrunJob
from benchmarks.recovery.processes import eventually, in_pid_namespace, kill
from benchmarks.recovery.records import Scenario
from benchmarks.recovery.steps import Step, StepLog, find_world
from benchmarks.recovery.trial import START_TIMEOUT, VICTIM_NODE, Job

SCENARIO = Scenario.NODE_REPLACED
"""The job has two nodes throughout; a lost one is replaced."""

RESOLUTION = 0.2
"""Seconds between two points of a line."""


class Fault(BaseModel):
    """Processes that are killed with SIGKILL."""

    at: float
    """Seconds after the first step of all ranks."""
    whole_node: bool = False
    """All processes of the second node; otherwise its rank."""

    @property
    def title(self) -> str:
        return "kill -9 of a node" if self.whole_node else "kill -9 of a rank"


class Plan(BaseModel):
    """What happens to a job, and for how long it is watched."""

    faults: tuple[Fault, ...]
    seconds: float
    folder: Path
    dlrover: Path | None = None
    """The `bin` folder of DLRover's environment; None: torchrun."""


class Point(BaseModel):
    """The step that rank 0 had made."""

    at: float
    """Seconds after the first step of all ranks."""
    step: int


class Record(BaseModel):
    """What became of a job."""

    lines: list[list[Point]]
    """A line for each process that rank 0 has been."""
    faults: list[float]
    """When each fault happened, in seconds after the first step of all ranks."""

    @property
    def last_step(self) -> int:
        return max((point.step for line in self.lines for point in line), default=0)


async def run_course(job: Job, plan: Plan) -> Record:
    """Runs the job through the faults and ends it."""
    log = StepLog(plan.folder)
    began = time.time()
    try:
        await job.start()
        first = await eventually(
            lambda: find_world(log.refresh(), world_size=job.size, after=began, count=5),
            seconds=START_TIMEOUT,
            otherwise="the job did not start stepping",
        )
        faults: list[float] = []
        for fault in plan.faults:
            await asyncio.sleep(max(0.0, first.time + fault.at - time.time()))
            faults.append(kill(_victims(job, fault, log.refresh())) - first.time)
            if fault.whole_node:
                await job.replace(VICTIM_NODE)
        await asyncio.sleep(max(0.0, first.time + plan.seconds - time.time()))
        return Record(lines=lines_of(log.refresh(), since=first.time, until=plan.seconds), faults=faults)
    finally:
        await job.stop()


def _victims(job: Job, fault: Fault, steps: list[Step]) -> list[psutil.Process]:
    node = job.processes(VICTIM_NODE)
    ranks = {step.pid for step in steps}
    return node if fault.whole_node else [process for process in node if process.pid in ranks]


def lines_of(steps: list[Step], *, since: float, until: float) -> list[list[Point]]:
    """The steps of rank 0, a line for each of its processes, with no more points than can be told apart."""
    by_process: dict[int, list[Point]] = {}
    for step in steps:
        at = step.time - since
        if step.rank != 0 or not 0 <= at <= until:
            continue
        line = by_process.setdefault(step.pid, [])
        if len(line) > 1 and at - line[-2].at < RESOLUTION:
            line.pop()
        line.append(Point(at=round(at, 2), step=step.step))
    return list(by_process.values())


async def run_peer(plan: Plan) -> Record:
    """Runs a job of a peer in a PID namespace of its own, so that none of its processes remains.

    Raises:
        RuntimeError: if that fails; its output is in the plan's folder.
    """
    command = [sys.executable, "-m", __spec__.name, plan.model_dump_json()]
    with (plan.folder / "harness.log").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *in_pid_namespace(command), stdout=asyncio.subprocess.PIPE, stderr=errors
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"the run of the peer failed: see {errors.name}")
    return Record.model_validate_json(output.decode().strip().splitlines()[-1])


def main() -> None:
    """Runs a peer's job."""
    plan = Plan.model_validate_json(sys.argv[1])
    job = (
        DLRoverJob(SCENARIO, plan.folder, binaries=plan.dlrover) if plan.dlrover else TorchrunJob(SCENARIO, plan.folder)
    )
    print(asyncio.run(run_course(job, plan)).model_dump_json())


if __name__ == "__main__":
    main()
