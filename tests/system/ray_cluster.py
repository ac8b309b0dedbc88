"""A Ray cluster on this machine: a head, and machines that tests add and kill, each with made resources."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from scripts.ray_environment import interpreter
from tests.support.temporal_server import free_port
from tests.support.waiting import eventually

_STORE = 100_000_000
"""Bytes of the object store of each machine, the least that Ray takes in a useful size."""


class RayCluster:
    """Starts `ray start` for each machine, all on this one."""

    def __init__(self, folder: Path, *, head_cpus: int = 0, machine_cpus: int = 1) -> None:
        self.folder = folder
        self.port = free_port()
        self._head_cpus = head_cpus
        self._machine_cpus = machine_cpus
        self.machines: list[asyncio.subprocess.Process] = []
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """What a worker needs to use the cluster."""
        return {
            "PERDURE_RAY_ADDRESS": self.address,
            "PERDURE_RAY_PYTHON": str(interpreter()),
            "PERDURE_RAY_NODE_PYTHON": sys.executable,
        }

    async def start(self, machines: int) -> None:
        """Starts the head and some machines."""
        head = ("--head", "--port", str(self.port), "--temp-dir", str(self.folder), "--include-dashboard=false")
        self.head = await self._start(*head, cpus=self._head_cpus)
        await eventually(lambda: _accepts(self.port), what="Ray's head")
        for _ in range(machines):
            await self.add()

    async def add(self) -> asyncio.subprocess.Process:
        """Adds a machine."""
        machine = await self._start("--address", self.address, cpus=self._machine_cpus)
        self.machines.append(machine)
        await eventually(lambda: self.raylet(machine), what="a raylet")
        return machine

    async def _start(self, *options: str, cpus: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(*_ray(), "start", *options, "--block", "--num-cpus", str(cpus)),
            *("--object-store-memory", str(_STORE), "--disable-usage-stats", "--node-ip-address", "127.0.0.1"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=self._environment,
        )

    def raylet(self, machine: asyncio.subprocess.Process) -> psutil.Process | None:
        """The raylet of a machine, once it runs."""
        return _child(machine, "raylet/raylet")

    def machine_of(self, process: psutil.Process) -> asyncio.subprocess.Process:
        """The machine on which a process of a node runs."""
        above = {parent.pid for parent in process.parents()}
        for machine in self.machines:
            raylet = self.raylet(machine)
            if raylet is not None and raylet.pid in above:
                return machine
        raise AssertionError(f"{process} runs on no machine")

    async def stop(self) -> None:
        """Ends all of its processes."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(self.folder) in " ".join(process.cmdline()) or str(self.port) in " ".join(process.cmdline()):
                    process.kill()
        for machine in (self.head, *self.machines):
            with suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
            await machine.wait()


def _ray() -> tuple[str, ...]:
    return (str(interpreter()), "-m", "ray.scripts.scripts")


def _child(machine: asyncio.subprocess.Process, sign: str) -> psutil.Process | None:
    with suppress(psutil.Error):
        for process in psutil.Process(machine.pid).children(recursive=True):
            if any(sign in word for word in process.cmdline()[:1]):
                return process
    return None


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
