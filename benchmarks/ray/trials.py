"""Trials: a training of two machines whose second rank or machine is killed, by Perdure on Ray or by Ray Train."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import psutil
from pydantic import BaseModel

from benchmarks.recovery.perdure_job import TORCHRUN, TRAIN
from benchmarks.recovery.processes import QUIET_NETWORK, TrialFailed, eventually, kill, tree
from benchmarks.recovery.processes import start as start_process
from benchmarks.recovery.steps import StepLog, WorldStart, find_world
from perdure.client.client import Client
from tests.system.ray_cluster import RayCluster

SIZE = 2
STARTS = 240.0
RECOVERS = 180.0
STEADY = 50
"""Steps before the kill, which falls in the middle between two checkpoints of the script's."""
PROGRAM = Path(__file__).with_name("programs") / "ray_train.py"
SETTINGS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180"}
"""Ray Train's: its controller looks at its workers each 2 s unless it is told otherwise, and starts over with a group
that is not there after 60 s, in which a loaded machine starts none."""


class Fault(StrEnum):
    RANK = "rank"
    """SIGKILL of the second rank."""
    NODE = "node"
    """SIGKILL of all processes of the second rank's machine, its raylet among them. A third machine is free."""


class SystemName(StrEnum):
    PERDURE = "perdure"
    RAY_TRAIN = "ray train"


class Trial(BaseModel):
    """What one kill has cost."""

    system: SystemName
    fault: Fault
    seconds: float | None = None
    """From the kill to the first step of all ranks of the next world; None if it did not recover."""
    lost: int | None = None
    """Steps that were done again."""
    problem: str = ""


class Training(Protocol):
    """A training that one system runs."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class RayTrainJob:
    """Ray Train V2, with failures without limit."""

    def __init__(self, cluster: RayCluster, folder: Path, variables: Mapping[str, str]) -> None:
        self._cluster, self._folder, self._variables = cluster, folder, variables
        self._driver: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        words = (str(self._cluster.python), PROGRAM, self._cluster.address, str(TRAIN), str(self._folder), str(SIZE))
        env = {**self._variables, **SETTINGS}
        self._driver = await start_process(words, env=env, log=self._folder / "driver.log")

    async def stop(self) -> None:
        """Ends the driver, and with it what Ray runs for it."""
        if self._driver is not None:
            kill(tree(self._driver.pid))
            await self._driver.wait()
        pids = {step.pid for step in StepLog(self._folder).refresh()}
        await eventually(
            lambda: None if any(map(psutil.pid_exists, pids)) else True, seconds=60, otherwise="ranks stay"
        )


class PerdureJob:
    """The same script by Perdure, on the same machines."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client, self._folder = client, folder
        self.name = f"bench-{secrets.token_hex(3)}"

    async def start(self) -> None:
        environment = {**QUIET_NETWORK, "BENCH_FOLDER": str(self._folder), "BENCH_MEMORY": "1"}
        role = {"nodes": SIZE, "nproc_per_node": 1, "command": [str(TORCHRUN), str(TRAIN)]}
        spec = {"name": self.name, "backend": "ray", "env": environment, "roles": {"worker": role}}
        await self._client.submit(spec)

    async def stop(self) -> None:
        await self._client.cancel(self.name)
        await self._client.wait(self.name)


async def measure(training: Training, system: SystemName, fault: Fault, *, cluster: RayCluster, folder: Path) -> Trial:
    """Runs one trial. Afterwards the cluster has as many machines as before."""
    log = StepLog(folder)

    def world(after: float, without: set[int]) -> WorldStart | None:
        return find_world(log.refresh(), world_size=SIZE, after=after, without=without)

    try:
        await training.start()
        before = await eventually(lambda: world(0, set()), seconds=STARTS, otherwise="it did not start")
        await eventually(
            lambda: True if any(step.step >= STEADY for step in log.refresh()) else None,
            seconds=STARTS,
            otherwise="it did not step",
        )
        victim = psutil.Process(before.pids[SIZE - 1])
        machine = cluster.machine_of(victim)
        killed_at = kill([victim] if fault is Fault.RANK else tree(machine.pid))
        if fault is Fault.NODE:
            cluster.machines.remove(machine)
            await machine.wait()
        after = await eventually(
            lambda: world(killed_at, {victim.pid}), seconds=RECOVERS, otherwise="it did not step again"
        )
    except (TrialFailed, psutil.Error, AssertionError) as error:
        return Trial(system=system, fault=fault, problem=str(error) or type(error).__name__)
    finally:
        await training.stop()
        while len(cluster.machines) < SIZE + 1:
            await cluster.add()
    had = max(step.step for step in log.steps if step.time <= killed_at)
    lost = max(0, had + 1 - after.first_step)
    return Trial(system=system, fault=fault, seconds=after.time - killed_at, lost=lost)


def quiet(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of all processes of the cluster."""
    return {**QUIET_NETWORK, **variables, "PATH": os.environ["PATH"]}
