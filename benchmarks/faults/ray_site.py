"""The matrix on Ray: a cluster of this machine, which is whole before each fault, and faults that only it has."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.chaos.faults import Kind, victims
from benchmarks.recovery.processes import TrialFailed, kill, tree
from tests.system.ray_cluster import RayCluster

from .injections import Injection
from .rows import DDP, Row, one_culprit
from .site import Run

MACHINES = 5
"""One more than the largest job of the matrix has nodes."""


class RaySite:
    """The cluster of all jobs of the matrix."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    async def make_whole(self) -> None:
        """Replaces the machines that a fault has taken."""
        for machine in [one for one in self._cluster.machines if self._cluster.raylet(one) is None]:
            self._cluster.machines.remove(machine)
        while len(self._cluster.machines) < MACHINES:
            await self._cluster.add()

    def machine_of(self, run: Run, node: int) -> asyncio.subprocess.Process:
        """Returns the machine of a node."""
        return self._cluster.machine_of(_launcher(run, node))

    def actor_of(self, run: Run, node: int) -> psutil.Process:
        """Returns the process in which Ray runs a node's actor."""
        above = _launcher(run, node).parents()
        return next(one for one in above if "ray::" in " ".join(one.cmdline()[:1]))

    async def drain(self, machine: asyncio.subprocess.Process) -> float:
        """Has Ray drain a machine that is preempted; returns when it was asked.

        Raises:
            TrialFailed: if Ray refuses.
        """
        if refusal := await self._cluster.drain(machine):
            raise TrialFailed(refusal)
        # It is as good as gone: Ray ends it once it is idle.
        self._cluster.machines.remove(machine)
        return self._cluster.drained_at


@asynccontextmanager
async def ray_site() -> AsyncGenerator[RaySite]:
    """Provides a cluster; workers that are started meanwhile serve it."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        # By default Ray's workers give way to every other process of this machine, and so would the ranks.
        cluster = RayCluster(Path(folder), variables={"RAY_worker_niceness": "0"})
        try:
            await cluster.start(machines=MACHINES)
            os.environ.update(cluster.variables)
            yield RaySite(cluster)
        finally:
            for name in cluster.variables:
                os.environ.pop(name, None)
            await cluster.stop()


def _launcher(run: Run, node: int) -> psutil.Process:
    found = next(victims(Kind.LAUNCHER, f"{run.uid}/worker-{node}/"), None)
    if found is None:
        raise TrialFailed(f"node {node} has no launcher")
    return found


@dataclass(frozen=True)
class _OnRay(Injection):
    """A fault of Ray, on the second node."""

    async def inject(self, run: Run) -> float:
        assert isinstance(run.site, RaySite)
        return await self.strike(run.site, run)

    async def strike(self, site: RaySite, run: Run) -> float:
        """Makes the fault, and returns its time."""
        raise NotImplementedError


class KillActor(_OnRay):
    """SIGKILL of the node's actor alone."""

    async def strike(self, site: RaySite, run: Run) -> float:
        return kill([site.actor_of(run, 1)])


class KillMachine(_OnRay):
    """SIGKILL of all processes of the node's machine, the raylet among them."""

    async def strike(self, site: RaySite, run: Run) -> float:
        machine = site.machine_of(run, 1)
        at = kill(tree(machine.pid))
        await machine.wait()
        return at


class DrainMachine(_OnRay):
    """Ray drains the node's machine, which is preempted."""

    async def strike(self, site: RaySite, run: Run) -> float:
        return await site.drain(site.machine_of(run, 1))


_REPLACES = ("REPLACE_NODES", "AWAIT_NODES")
RAY_ROWS = (
    Row("kill-actor", DDP, KillActor(), one_culprit("NODE_LOST", *_REPLACES, within=10.0)),
    Row("kill-machine", DDP, KillMachine(), one_culprit("NODE_LOST", *_REPLACES, within=10.0)),
    Row("drain-machine", DDP, DrainMachine(), one_culprit("PREEMPTED", *_REPLACES, within=10.0)),
)
