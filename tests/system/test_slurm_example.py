"""Tests of the unmodified Slurm example, on three machines with networks of their own; Slurm itself is simulated."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.activities.nodes.joined.backend import JoinedBackend
from perdure.client.client import Client
from perdure.contract import FailureClass
from perdure.worker import running_worker
from tests.support.allocation import REPOSITORY, Allocation, allocation
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.system.joined import Machines, machines
from tests.system.site import SCRIPT, Job

SBATCH = REPOSITORY / "examples" / "05-slurm" / "train.sbatch"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root"),
    pytest.mark.long("joining"),
]


@dataclass
class Cluster:
    allocation: Allocation
    machines: Machines
    client: Client

    def srun(self, node: str, *command: str) -> None:
        self.machines.start("srun", "--kill-on-bad-exit=0", "-w", node, *command)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three nodes that reach the Temporal server over their network, and no other way."""
    with allocation(tmp_path, nodes=3) as given:
        async with dev_server(options=("--ip", "0.0.0.0")) as server:
            temporal = await server.client()
            connection = {"TEMPORAL_ADDRESS": f"{given.host}:{server.port}", "OMP_NUM_THREADS": "1"}
            async with (
                running_worker(temporal, backends=[JoinedBackend()]),
                machines(tmp_path, given.environment | connection) as running,
            ):
                yield Cluster(given, running, Client(temporal=temporal))


async def test_a_task_that_dies_and_is_started_again_has_its_place_back(cluster: Cluster, tmp_path: Path):
    given, name = cluster.allocation, f"slurm-{cluster.allocation.number}"
    training = ("torchrun", str(SCRIPT), str(tmp_path))
    batch = cluster.machines.start("bash", str(SBATCH), *training)
    client = cluster.client
    await eventually(lambda: "started the job" in batch.text, what=lambda: f"a job, but {batch.text}")
    job = Job(client, name, (await client.status(name)).uid, tmp_path)
    known = await job.running(nodes=3)
    await job.stepping(generation=known.generation, ranks=3)
    nodes = {node.host: node for node in await client.nodes(name)}
    assert {host: node.rank for host, node in nodes.items()} == {"node-0": 0, "node-1": 1, "node-2": 2}
    assert len({node.address for node in nodes.values()} - {"127.0.0.1", given.host}) == 3

    assert given.crash("node-1") > 3
    known = await job.running(nodes=2, after=known.generation)
    await job.stepping(generation=known.generation, ranks=2)
    (incident, *_) = await job.incidents()
    assert (incident.failure, incident.culprit) == (FailureClass.NODE_UNRESPONSIVE, 1)

    cluster.srun("node-1", "perdure", "join", name, "--wait", "--", *training)
    known = await job.running(nodes=3, after=known.generation)
    await job.stepping(generation=known.generation, ranks=3)
    back = {node.host: (node.rank, node.incarnation) for node in await client.nodes(name)}
    assert back == {"node-0": (0, 1), "node-1": (1, 2), "node-2": (2, 1)}

    given.crash("node-2")
    cluster.srun("node-2", "perdure", "join", name, "--wait", "--", *training)
    known = await job.running(nodes=3, after=known.generation)
    signs = [sign.text for incident in await job.incidents() for sign in incident.evidence]
    assert any("has joined again from node-2" in sign for sign in signs), signs

    await client.cancel(name)
    assert await batch.leave() >= 4
    assert not job.processes()
