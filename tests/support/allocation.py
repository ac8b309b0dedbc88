"""A simulated allocation: several machines on one, each with its own network namespace connected to a switch (needs
root)."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ALLOCATION_VARIABLE = "TESTS_ALLOCATION"
"""The network namespace of each node, for the played `srun`."""

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Network:
    """The network namespace of a node."""

    name: str
    address: str

    @property
    def entered(self) -> tuple[str, ...]:
        """The beginning of a command that runs in it."""
        return ("ip", "netns", "exec", self.name)


@dataclass
class Allocation:
    """Nodes that a scheduler gave a user."""

    number: str
    """Slurm's job ID."""
    host: str
    """The address by which the nodes reach this machine."""
    programs: Path
    """With the played `srun`."""
    networks: dict[str, str] = field(default_factory=dict[str, str])
    """The network namespace of each node."""
    addresses: dict[str, str] = field(default_factory=dict[str, str])

    def network(self, node: str) -> Network:
        """The network namespace of a node, with its address."""
        return Network(self.networks[node], self.addresses[node])

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a batch script."""
        path = os.pathsep.join([str(self.programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {
            "PATH": path,
            "SLURM_JOB_ID": self.number,
            "SLURM_JOB_NUM_NODES": str(len(self.networks)),
            ALLOCATION_VARIABLE: json.dumps(self.networks),
        }

    def crash(self, node: str) -> int:
        """Ends everything on a node without a word; returns how many processes there were."""
        pids = [int(pid) for pid in _ip("netns", "pids", self.networks[node]).split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)


@contextmanager
def allocation(folder: Path, *, nodes: int) -> Generator[Allocation]:
    """Machines that are gone with all their processes when the context closes."""
    mark = secrets.token_hex(3)
    subnet = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(256)}"
    given = Allocation(number=str(int(mark, 16)), host=f"{subnet}.1", programs=_programs(folder))
    switch = f"sw{mark}"
    with ExitStack() as cleanup:
        _ip("link", "add", switch, "type", "bridge")
        cleanup.callback(_ip, "link", "delete", switch)
        _ip("address", "add", f"{given.host}/24", "dev", switch)
        _ip("link", "set", switch, "up")
        for index in range(nodes):
            network, cable = f"node-{index}-{mark}", f"v{index}-{mark}"
            _ip("netns", "add", network)
            cleanup.callback(_ip, "netns", "delete", network)
            given.networks[f"node-{index}"] = network
            given.addresses[f"node-{index}"] = f"{subnet}.{index + 2}"
            cleanup.callback(given.crash, f"node-{index}")
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", network)
            _ip("link", "set", cable, "master", switch, "up")
            _ip("-n", network, "address", "add", f"{given.addresses[f'node-{index}']}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", network, "link", "set", interface, "up")
        yield given


def _programs(folder: Path) -> Path:
    programs = folder / "programs"
    programs.mkdir()
    srun = programs / "srun"
    played = shlex.join(["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "tests.support.fake_srun"])
    srun.write_text(f'#!/bin/sh\nexec {played} "$@"\n')
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    return programs


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
