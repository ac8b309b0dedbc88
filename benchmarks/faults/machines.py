"""Machines of their own for the nodes of local jobs, since some faults are those of a network or of a clock.

Each node runs in a network namespace, all of them connected to a switch (Linux, root). `placed_worker` starts the nodes
there.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.recovery.processes import TrialFailed
from tests.support.allocation import allocation

PLACED_WORKER = "benchmarks.faults.placed_worker"
NODES = 3
"""The most nodes of a job on these machines."""
INTERFACE = "eth0"
"""The interface of each machine that leads to the others."""
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE}
"""Variables of the ranks on these machines."""
FOLDER_VARIABLE = "FAULTS_MACHINES"
"""The folder in which a worker and its nodes find what is known of the machines."""
_CLOCK = Path(__file__).with_name("programs") / "skewed_clock.c"


class Machine(NamedTuple):
    """The machine of one node (slot)."""

    network: str
    """The name of its network namespace."""
    address: str

    def run(self, *command: str) -> None:
        """Runs a command in its network.

        Raises:
            TrialFailed: if the command fails.
        """
        run("ip", "netns", "exec", self.network, *command)


class Placement(NamedTuple):
    """All machines."""

    gateway: str
    """The address by which the machines reach this one."""
    machines: list[Machine]


@contextmanager
def machines() -> Generator[None]:
    """Provides machines; workers that are started meanwhile know of them.

    Raises:
        TrialFailed: if this machine does not allow that.
    """
    with tempfile.TemporaryDirectory(prefix="pm-") as folder:
        path = Path(folder)
        try:
            with allocation(path, nodes=NODES) as allocated:
                subnet = allocated.host.rpartition(".")[0]
                names = enumerate(allocated.networks.values())
                each = [Machine(name, f"{subnet}.{number + 2}") for number, name in names]
                (path / "placement").write_text(json.dumps([allocated.host, each]), encoding="utf-8")
                os.environ[FOLDER_VARIABLE] = folder
                try:
                    yield
                finally:
                    del os.environ[FOLDER_VARIABLE]
        except subprocess.CalledProcessError as error:
            raise TrialFailed(f"no networks: {error.stderr}") from error


def placement() -> Placement:
    """What is known of the machines."""
    gateway, each = json.loads((_folder() / "placement").read_text())
    return Placement(gateway, [Machine(*machine) for machine in each])


def skew(node: int, seconds: int) -> None:
    """Has the clock of the next node in this slot differ from that of the others by so much.

    Raises:
        TrialFailed: if this machine has no compiler.
    """
    run("cc", "-shared", "-fPIC", "-O1", "-o", str(_folder() / "skewed_clock.so"), str(_CLOCK))
    _skew_of(node).write_text(f"{seconds}", encoding="utf-8")


def set_right(node: int) -> None:
    """Has the next node in this slot see the clock of the others."""
    _skew_of(node).unlink(missing_ok=True)


def run(*command: str) -> None:
    """Runs a command of the system.

    Raises:
        TrialFailed: if it fails.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise TrialFailed(f"{' '.join(command)}: {getattr(error, 'stderr', '') or error}") from error


def _skew_of(node: int) -> Path:
    return _folder() / f"skew-{node}"


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])
