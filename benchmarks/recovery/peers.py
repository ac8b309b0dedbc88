"""The peers: plain torchrun with its c10d rendezvous, and DLRover's local mode. Each node is one launcher process."""

from __future__ import annotations

import asyncio
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .processes import eventually, free_port, kill, start, tree, with_own_memory
from .records import Composition, Scenario

TRAIN = Path(__file__).with_name("train.py")
RESTARTS = "10"


@dataclass
class PeerJob(ABC):
    """Common base of the peers: nodes are child processes, which the benchmark itself restarts."""

    scenario: Scenario
    folder: Path
    size: int = 2
    program: Sequence[str | Path] = (TRAIN,)
    """The script of the ranks, with its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further variables of the ranks."""
    restarts: str = RESTARTS
    """How often the peer may restart ranks."""
    _nodes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict[int, asyncio.subprocess.Process])
    _others: list[asyncio.subprocess.Process] = field(default_factory=list[asyncio.subprocess.Process])

    @abstractmethod
    async def start(self) -> None:
        """Starts all processes of the system."""

    def alive(self) -> bool:
        return any(node.returncode is None for node in self._nodes.values())

    def processes(self, node: int) -> list[psutil.Process]:
        return tree(self._nodes[node].pid)

    async def forbid_replacement(self) -> None:
        """Does nothing: only this benchmark starts replacements."""

    async def replace(self, node: int) -> None:
        await self._nodes[node].wait()
        await self._start_node(node)

    async def compose(self, killed_at: float) -> Composition:
        return Composition()

    async def stop(self) -> None:
        started = [*self._nodes.values(), *self._others]
        kill(process for top in started for process in tree(top.pid))
        for top in started:
            await top.wait()

    async def _start_node(self, node: int) -> None:
        command, env = self._node_command(node)
        log = self.folder / f"node-{node}.log"
        env = {"BENCH_FOLDER": str(self.folder), **self.environment, **env}
        self._nodes[node] = await start(command, env=env, log=log)

    @property
    def _options(self) -> list[str]:
        nodes = self.scenario.nodes(self.size)
        return [f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={self.restarts}"]

    @abstractmethod
    def _node_command(self, node: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        """Returns the command of a node, and the variables that it needs."""


@dataclass
class TorchrunJob(PeerJob):
    """`torchrun --rdzv-backend=c10d`, as PyTorch's documentation has it."""

    own_store: bool = False
    """Whether workers get a store of their own instead of the launcher's, whose keys outlive a restart."""
    _port: int = field(default_factory=free_port)

    async def start(self) -> None:
        await self._start_node(0)
        # The first node to listen hosts the store; a second one that looks too early would take the port itself.
        await eventually(self._store_answers, seconds=60, otherwise="torchrun's store did not open")
        for node in range(1, self.size):
            await self._start_node(node)

    @property
    def _launcher(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "torch.distributed.run"]

    def _store_answers(self) -> bool | None:
        return True if answers(self._port) else None

    def _node_command(self, node: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-id=bench", f"--rdzv-endpoint=127.0.0.1:{self._port}"]
        command = [*self._launcher, *self._options, *rendezvous, "--local-addr=127.0.0.1"]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.own_store else {}
        return [*command, *self.program], env


@dataclass
class NVRxJob(TorchrunJob):
    """NVIDIA's resiliency extension: one `ft_launcher` for each node, which is torchrun with a monitor of each rank."""

    binaries: Path = Path()
    """The `bin` folder of its environment."""

    @property
    def _launcher(self) -> Sequence[str | Path]:
        return [self.binaries / "ft_launcher", "--ignore-missing-fault-tol-cfg"]


@dataclass
class DLRoverJob(PeerJob):
    """A master and one `dlrover-run` per node."""

    binaries: Path = Path()
    """The `bin` folder of DLRover's environment."""
    _port: int = field(default_factory=free_port)

    async def start(self) -> None:
        options = [
            "--platform",
            "local",
            "--job_name",
            "bench",
            "--node_num",
            str(self.size),
            "--port",
            str(self._port),
        ]
        master = [self.binaries / "python", "-u", "-m", "dlrover.python.master.main", *options]
        self._others.append(await start(master, env={}, log=self.folder / "master.log"))
        await eventually(self._master_answers, seconds=90, otherwise="DLRover's master did not open its port")
        for node in range(self.size):
            await self._start_node(node)

    def _master_answers(self) -> bool | None:
        return True if answers(self._port) else None

    def _node_command(self, node: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        env = {
            "DLROVER_MASTER_ADDR": f"127.0.0.1:{self._port}",
            "JOB_NAME": "bench",
            "NODE_NUM": str(self.size),
            "NODE_RANK": str(node),
            "NODE_ID": str(node),
            "POD_NAME": f"bench-{node}",
            "POD_IP": "127.0.0.1",
            "NODE_IP": "127.0.0.1",
        }
        env["BENCH_FLASH"] = "1"
        return with_own_memory([self.binaries / "dlrover-run", *self._options, *self.program]), env


def answers(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex(("127.0.0.1", port)) == 0
