"""Tests of jobs of several roles on a Ray cluster whose machines have networks of their own: parts of each role are
killed, and machines that roles share."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from examples.demo.faults import processes_of_node
from examples.demo.learning import EXAMPLE, REWARD, ROLLOUT, TRAINER, Learning
from examples.demo.trajectories import read_trained
from perdure.activities.nodes.ray.backend import RayBackend
from perdure.activities.nodes.ray.settings import RaySettings
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.worker import running_worker
from scripts.ray_environment import interpreter
from tests.support.allocation import Allocation, allocation
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import ACTORS, GROUPS, asked

PORT = 6100
"""Of the reward model."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root"),
    pytest.mark.long("ray"),
    pytest.mark.timeout(900),
]


@dataclass
class Machines:
    """A cluster of Ray, and a worker that serves it."""

    cluster: RayCluster
    allocation: Allocation
    client: Client

    async def start(self, *options: str) -> None:
        """Starts the head and all machines."""
        await self.cluster.start_head()
        for node in self.allocation.networks:
            await self.cluster.add(*options, network=self.allocation.network(node))

    def of(self, learning: Learning, role: str, node: int) -> str:
        """The machine on which a node runs."""
        here = os.stat(f"/proc/{launcher_of(learning, role, node).pid}/ns/net").st_ino
        for name, network in self.allocation.networks.items():
            if os.stat(f"/run/netns/{network}").st_ino == here:
                return name
        raise AssertionError(f"{role} {node} runs on no machine")


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    with (
        allocation(tmp_path, nodes=3) as given,
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        cluster = RayCluster(Path(folder), host=given.host)
        async with dev_server(options=("--ip", "0.0.0.0")) as server:
            temporal = await server.client()
            backend = RayBackend(
                RaySettings(
                    address=cluster.address,
                    python=str(interpreter()),
                    node_python=sys.executable,
                    connection={"TEMPORAL_ADDRESS": f"{given.host}:{server.port}"},
                )
            )
            try:
                async with running_worker(temporal, backends=[backend]):
                    yield Machines(cluster, given, Client(temporal=temporal))
            finally:
                await cluster.stop()


class LearningOnRay(Learning):
    """The job of `examples/09-reinforcement-learning/ray.yaml`."""

    def __init__(self, machines: Machines, out: Path, *, steps: int) -> None:
        super().__init__(machines.client, out, steps=steps)
        self._machines = machines

    async def reward_address(self) -> tuple[str, int] | None:
        """Returns the address of its machine."""
        try:
            machine = self._machines.of(self, REWARD, 0)
        except StopIteration:
            return None
        return self._machines.allocation.addresses[machine], PORT

    def place(self, job: dict[str, Any]) -> None:
        on_ray: dict[str, Any] = yaml.safe_load((EXAMPLE / "ray.yaml").read_text())
        job["backend"], job["workdir"], job["roles"] = "ray", {"path": str(EXAMPLE)}, on_ray["roles"]
        for fields in job["roles"].values():
            # Of both machines, from the start.
            fields["nodes"] = int(str(fields["nodes"]).rpartition(":")[2])


def launcher_of(learning: Learning, role: str, node: int) -> psutil.Process:
    """The launcher of a node."""
    return next(one for one in processes_of_node(learning.uid, role, node) if "launcher" in str(one.cmdline()))


def actor_of(learning: Learning, role: str, node: int) -> psutil.Process:
    """The process in which Ray runs the actor of a node."""
    return next(one for one in launcher_of(learning, role, node).parents() if "ray::" in " ".join(one.cmdline()[:1]))


class LosesMachines(LearningOnRay):
    """Nodes end with their machines, whose raylets are killed."""

    async def lose_node(self, role: str, node: int) -> None:
        """Kills the raylet of the node's machine; Ray's other processes there end by themselves."""
        cluster = self._machines.cluster
        raylet = cluster.raylet(cluster.machine_of(actor_of(self, role, node)))
        assert raylet is not None
        raylet.kill()


class LosesActors(LearningOnRay):
    """Nodes end with their actors, which Ray's processes are."""

    async def lose_node(self, role: str, node: int) -> None:
        """Kills the actor of a node."""
        actor_of(self, role, node).kill()


async def test_each_role_is_killed_in_turn_on_machines_that_they_share(machines: Machines, tmp_path: Path):
    await machines.start("--num-gpus", "1")
    learning = LosesActors(machines, tmp_path / "out", steps=250)
    await learning.start()
    for node in (0, 1):
        assert machines.of(learning, TRAINER, node) == machines.of(learning, ROLLOUT, node)
    for role, whole_node in [(ROLLOUT, False), (ROLLOUT, True), (REWARD, False), (TRAINER, False), (TRAINER, True)]:
        fault = await learning.kill(role, 0, whole_node=whole_node)
        print(fault)
        assert (fault.other_restarts, fault.lost, fault.doubled) == (0, 0, 0), fault
    result = await learning.wait()
    assert result.phase is JobPhase.SUCCEEDED, result
    trained = read_trained(learning.out)
    assert (len(trained.of_steps), trained.lost, trained.doubled) == (250, 0, 0)
    assert await asked(machines.cluster, ACTORS) == []
    assert await asked(machines.cluster, GROUPS) == []


async def test_roles_that_share_a_machine_move_together_when_its_raylet_is_killed(machines: Machines, tmp_path: Path):
    await machines.start("--num-gpus", "1")
    learning = LosesMachines(machines, tmp_path / "out", steps=400)
    await learning.start()
    # A machine with a trainer and its rollout first, and then one that has the reward model.
    without_reward = 1 if machines.of(learning, TRAINER, 0) == machines.of(learning, REWARD, 0) else 0
    await loses_machine(machines, learning, without_reward, restarts=1)
    with_reward = [node for node in (0, 1) if machines.of(learning, TRAINER, node) == machines.of(learning, REWARD, 0)]
    await loses_machine(machines, learning, *(with_reward or [1 - without_reward]), restarts=1 + len(with_reward))
    result = await learning.wait()
    assert result.phase is JobPhase.SUCCEEDED, result
    trained = read_trained(learning.out)
    assert (len(trained.of_steps), trained.lost, trained.doubled) == (400, 0, 0)
    assert await asked(machines.cluster, ACTORS) == []
    assert await asked(machines.cluster, GROUPS) == []


async def loses_machine(machines: Machines, learning: LearningOnRay, node: int, *, restarts: int) -> None:
    """Kills the raylet of a trainer's machine, and then brings the machine back.

    Args:
        machines: of the job.
        learning: the job.
        node: of the trainer.
        restarts: processes of other roles on the machine.
    """
    lost = machines.of(learning, TRAINER, node)
    fault = await learning.kill(TRAINER, node, whole_node=True)
    print(fault)
    assert (fault.other_restarts, fault.lost, fault.doubled) == (restarts, 0, 0), fault

    def together() -> bool:
        with suppress(StopIteration, psutil.Error):
            there = machines.of(learning, TRAINER, node)
            return there != lost and machines.of(learning, ROLLOUT, node) == there
        return False

    await eventually(together, what="trainer and rollout on another machine", within=learning.within)
    await machines.cluster.add("--num-gpus", "1", network=machines.allocation.network(lost))
