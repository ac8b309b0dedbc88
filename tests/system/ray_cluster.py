"""A Ray cluster on this machine: a head, and machines that tests add and kill, each with made resources."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from scripts.ray_environment import interpreter
from scripts.redis_server import NAME
from tests.support.allocation import Network
from tests.support.temporal_server import free_port
from tests.support.waiting import eventually

_STORE = 100_000_000
"""Bytes of the object store of each machine, the least that Ray takes in a useful size."""

_DRAIN = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
address, node, reason, seconds = sys.argv[1:]
client = GcsClient(address=address)
asked_at = time.time()
deadline = int((asked_at + int(seconds)) * 1000) if int(seconds) else 0
reason = autoscaler_pb2.DrainNodeReason.Value(reason)
accepted, refusal = client.drain_node(node, reason, "the machine is wanted back", deadline)
print(asked_at)
print("" if accepted else refusal)
"""
"""What `ray drain-node` does, with the time at which it does it."""


class RayCluster:
    """Starts `ray start` for each machine, all on this one."""

    def __init__(
        self,
        folder: Path,
        *,
        head_cpus: int = 0,
        machine_cpus: int = 1,
        python: Path | None = None,
        variables: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        user: str | None = None,
        through_client: bool = False,
    ) -> None:
        """Creates a cluster that has not started.

        Args:
            folder: of its sockets and logs; its path must be short.
            head_cpus: made resources of the head.
            machine_cpus: made resources of each machine.
            python: the interpreter with Ray.
            variables: of all its processes.
            host: the head's address.
            user: as whom all its processes run; by default that of the tests.
            through_client: whether workers connect through Ray's client, as from outside of the cluster's network.
        """
        self.folder = folder
        self.host = host
        self.python = python or interpreter()
        self.node_python = Path(sys.executable)
        """The interpreter with Perdure on its machines."""
        self._user = user
        self.port = free_port()
        self._client_port = free_port()
        self._through_client = through_client
        self._head_cpus = head_cpus
        self._machine_cpus = machine_cpus
        self.head: asyncio.subprocess.Process | None = None
        self.machines: list[asyncio.subprocess.Process] = []
        self._tables: asyncio.subprocess.Process | None = None
        self._head_variables: dict[str, str] = {}
        self._head_options: tuple[str, ...] = ()
        self.drained_at = 0.0
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        self._environment |= variables or {}

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """What a worker needs to use the cluster."""
        return {
            "PERDURE_RAY_ADDRESS": f"ray://{self.host}:{self._client_port}" if self._through_client else self.address,
            "PERDURE_RAY_PYTHON": str(self.python),
            "PERDURE_RAY_NODE_PYTHON": str(self.node_python),
        }

    @property
    def _serves_clients(self) -> bool:
        """Whether the interpreter has what Ray's client needs; without it, Ray takes no port for that."""
        return any(self.python.parent.parent.glob("lib/python*/site-packages/grpc"))

    @property
    def _ray(self) -> tuple[str, ...]:
        return (str(self.python), "-m", "ray.scripts.scripts")

    async def start(self, machines: int) -> None:
        """Starts the head and some machines."""
        await self.start_head()
        for _ in range(machines):
            await self.add()

    async def keep_tables(self, redis: Path) -> None:
        """Has heads that are started from now on keep their tables outside of them: Ray's fault tolerance."""
        port = free_port()
        self._tables = await asyncio.create_subprocess_exec(
            *(NAME, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)),
            executable=redis,
            start_new_session=True,
            stdout=asyncio.subprocess.DEVNULL,
        )
        self._head_variables = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
        await eventually(lambda: _accepts("127.0.0.1", port), what="Redis")

    def never_spill(self) -> None:
        """Has a head that is started from now on forbid object stores to write to a disk: they become full."""
        system = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0}
        self._head_options = ("--system-config", json.dumps(system))

    async def kill_head(self) -> None:
        """Kills all processes of the head at once."""
        assert self.head is not None
        await _end(self.head)

    async def start_head(self) -> None:
        """Starts the head in place of one that has died; its tables are empty unless they are kept."""
        if self.head is not None:
            await _end(self.head)
            # By it `ray start` finds a head that runs on this host.
            (self.folder / "ray_current_cluster").unlink(missing_ok=True)
        head = ("--head", "--port", str(self.port), "--temp-dir", str(self.folder), "--include-dashboard=false")
        if self._serves_clients:
            # Else Ray starts this server of each head at one port.
            head += ("--ray-client-server-port", str(self._client_port))
        self.head = await self._start(*head, *self._head_options, cpus=self._head_cpus, variables=self._head_variables)
        await eventually(lambda: _accepts(self.host, self.port), what="Ray's head")
        await self._serves(self.head)
        if self._through_client:
            await eventually(lambda: _accepts(self.host, self._client_port), what="Ray's server of clients")

    async def add(self, *options: str, network: Network | None = None, **variables: str) -> asyncio.subprocess.Process:
        """Adds a machine, with options and variables of its own, and in a network of its own."""
        machine = await self._start(
            *("--address", self.address, *options), cpus=self._machine_cpus, variables=variables, network=network
        )
        self.machines.append(machine)
        await self._serves(machine)
        return machine

    async def drain(self, machine: asyncio.subprocess.Process, *, seconds: int | None = 300) -> str:
        """Has Ray drain a machine, as an autoscaler does that preempts it, or without a deadline, finds it idle.
        Returns why Ray refuses; `drained_at` is when it was asked."""
        raylet = self.raylet(machine)
        assert raylet is not None
        reason = f"DRAIN_NODE_REASON_{'IDLE_TERMINATION' if seconds is None else 'PREEMPTION'}"
        process = await asyncio.create_subprocess_exec(
            *(str(self.python), "-c", _DRAIN, self.address, _option(raylet, "node_id"), reason, str(seconds or 0)),
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0
        at, _, refusal = printed.decode().partition("\n")
        self.drained_at = float(at)
        return refusal.strip()

    async def _serves(self, machine: asyncio.subprocess.Process) -> None:
        """Waits until a machine's raylet accepts connections: raylets of one host that start at the same time choose
        the same sockets, and one of them aborts."""

        def serves() -> bool:
            assert machine.returncode is None, f"ray start exited with {machine.returncode}"
            raylet = self.raylet(machine)
            return raylet is not None and _accepts_at(_option(raylet, "raylet_socket_name"))

        await eventually(serves, what="a raylet")

    async def _start(
        self,
        *options: str,
        cpus: int,
        variables: Mapping[str, str] | None = None,
        network: Network | None = None,
    ) -> asyncio.subprocess.Process:
        inside, address = (network.entered, network.address) if network else ((), self.host)
        return await asyncio.create_subprocess_exec(
            *(*inside, *self._ray, "start", *options, "--block", "--num-cpus", str(cpus)),
            *("--object-store-memory", str(_STORE), "--disable-usage-stats", "--node-ip-address", address),
            # All machines of one host write their logs into one folder, which each machine's monitor would follow.
            *("--include-log-monitor", "false"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=self._environment | dict(variables or {}),
            user=self._user,
            group=self._user and pwd.getpwnam(self._user).pw_gid,
            extra_groups=self._user and [],
        )

    def raylet(self, machine: asyncio.subprocess.Process) -> psutil.Process | None:
        """The raylet of a machine, once it runs."""
        return _child(machine, "raylet/raylet")

    def gcs(self) -> psutil.Process:
        """The process of the head that holds the cluster's tables."""
        gcs = _child(self.head, "gcs/gcs_server") if self.head else None
        assert gcs is not None
        return gcs

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
        for machine in filter(None, (self.head, *self.machines, self._tables)):
            await _end(machine)


async def _end(machine: asyncio.subprocess.Process) -> None:
    with suppress(psutil.Error):
        for process in psutil.Process(machine.pid).children(recursive=True):
            process.kill()
    with suppress(ProcessLookupError):
        os.killpg(machine.pid, signal.SIGKILL)
    await machine.wait()


def _child(machine: asyncio.subprocess.Process, sign: str) -> psutil.Process | None:
    with suppress(psutil.Error):
        for process in psutil.Process(machine.pid).children(recursive=True):
            if any(sign in word for word in process.cmdline()[:1]):
                return process
    return None


def _option(process: psutil.Process, name: str) -> str:
    """The value of an option of a process of Ray."""
    with suppress(psutil.Error):
        for word in process.cmdline():
            if word.startswith(f"--{name}="):
                return word.partition("=")[2]
    return ""


def _accepts_at(path: str) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        return True
    return False


def _accepts(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
