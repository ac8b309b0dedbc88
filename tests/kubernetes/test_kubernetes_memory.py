"""Checkpoints of pods: after a killed rank from the same pod's memory, after a lost pod from another one's; in storage
on a volume."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.pod import RANK
from perdure.contract import CheckpointView, JobPhase, RestoreSource
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.kubernetes.test_kubernetes_job import one_pod_per_machine
from tests.support.allocation import REPOSITORY
from tests.support.command_line import PERDURE
from tests.support.waiting import eventually
from tests.system.made_steps import repeated, steps
from tests.system.site import PATIENCE, Job

STEPS = 300
ZONE = "topology.kubernetes.io/zone"

LOAD = """
import sys

from torch import zeros
from torch.distributed.checkpoint import load

state = {"model": {"module.0.weight": zeros(64, 32)}, "step": 0}
load(state, checkpoint_id=sys.argv[1])
assert "perdure_training" not in sys.modules
print(state["step"], bool(state["model"]["module.0.weight"].any()))
"""
"""Loads a part of the example's state with torch alone."""


async def restored(training: Job, source: RestoreSource, *, after: int) -> CheckpointView:
    """What the job says of its checkpoints once a world beyond this generation continued from there."""
    known = await training.until(lambda status: status.checkpoint.restored_generation > after)
    assert known.checkpoint.restored_from is source
    return known.checkpoint


async def delete_pods(job: PodJob, *ranks: int) -> None:
    """Ends nodes as `kubectl delete pod` does."""
    for pod in await job.pods():
        if int(pod["metadata"]["labels"][RANK]) in ranks:
            await job.api.delete(f"{job.pods_path}/{pod['metadata']['name']}")


@pytest.fixture
async def claim(job: PodJob, results: Path) -> AsyncIterator[tuple[str, Path]]:
    """A claim in the job's namespace on a volume that is a folder of this machine: its name, and the folder."""
    name, folder = f"storage-{secrets.token_hex(4)}", results / "storage"
    folder.mkdir()
    # The agents are another user, and a volume of this kind has no group of its own.
    folder.chmod(0o777)
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}, **common}
    claimed = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": name, **common}
    volumes = "/api/v1/persistentvolumes"
    kind = {"apiVersion": "v1", "metadata": {"name": name}}
    await job.api.create(volumes, {"kind": "PersistentVolume", "spec": volume, **kind})
    path = f"/api/v1/namespaces/{job.namespace}/persistentvolumeclaims"
    await job.api.create(path, {"kind": "PersistentVolumeClaim", "spec": claimed, **kind})
    yield name, folder
    await job.api.delete(f"{volumes}/{name}")


@pytest.fixture
async def zones(own_cluster: Cluster, job: PodJob) -> AsyncIterator[dict[str, str]]:
    """Labels each machine with a zone of its own; by the names of the machines."""
    found = {node.name: f"zone-{number}" for number, node in enumerate(own_cluster.nodes())}
    for name, zone in found.items():
        await job.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {ZONE: zone}}})
    yield found
    for name in found:
        await job.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {ZONE: None}}})


async def test_a_pod_learns_its_rack_from_the_label_of_its_machine(
    cluster: TestCluster, backend: KubernetesBackend, job: PodJob, zones: dict[str, str], results: Path
) -> None:
    worker = role(
        results,
        nodes=2,
        command=[
            "sh",
            "-c",
            f'echo "$PERDURE_RACK" > {results}/.$HOSTNAME && mv {results}/.$HOSTNAME {results}/$HOSTNAME',
        ],
        pod_template=one_pod_per_machine("made-up"),
    )
    job = job.changed(worker)
    for rank in (0, 1):
        await backend.create(job.request(rank))
    await eventually(lambda: len(list(results.glob("made-up*"))) == 2, within=PATIENCE)
    pods = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in await job.pods()}
    assert set(pods.values()) == set(zones)
    assert {name: (results / name).read_text().strip() for name in pods} == {
        name: zones[machine] for name, machine in pods.items()
    }


@pytest.mark.long("cluster-faults")
@pytest.mark.parametrize("example", ["plain.py", "sharded.py"])
async def test_a_killed_rank_and_a_lost_pod_lose_at_most_one_step(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path, example: str
) -> None:
    name = f"k-{secrets.token_hex(4)}"
    script = REPOSITORY / "examples" / "04-checkpoints" / example
    async with perdure(cluster, job.namespace) as (_, client):
        worker = {
            "nodes": 2,
            "image": BARE_IMAGE,
            "command": ["torchrun", str(script), "--steps", str(STEPS), "--out", str(results)],
            "resources": {"shm": "32Mi"},
            "pod_template": merge(with_host_programs(results), one_pod_per_machine(name)),
        }
        training = await start(client, worker, results, name=name)
        await eventually(lambda: 30 in steps(training, 0), within=PATIENCE)
        training.signal(1, "rank")
        await restored(training, RestoreSource.MEMORY, after=1)
        made = steps(training, 0)[-1]
        await eventually(lambda: steps(training, 0)[-1] >= made + 10, within=PATIENCE)
        generation = (await training.status()).generation
        await delete_pods(job, 0)
        await restored(training, RestoreSource.PEER, after=generation)
        result = await client.wait(name)
        assert result.phase is JobPhase.SUCCEEDED
        assert [incident.culprit for incident in await training.incidents()][:2] == [1, 0]
        for rank in (0, 1):
            assert sorted(set(steps(training, rank))) == list(range(1, STEPS + 1))
            assert repeated(steps(training, rank)) <= 2


@pytest.mark.long("cluster-faults")
async def test_a_lost_pod_gets_what_its_script_has_saved_from_the_agent_of_another_one(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    for rank in (0, 1):
        (results / str(rank)).mkdir()
    name = f"k-{secrets.token_hex(4)}"
    script = shlex.join([sys.executable, str(REPOSITORY / "tests" / "system" / "saves_itself.py")])
    async with perdure(cluster, job.namespace) as (_, client):
        worker = {
            "nodes": 2,
            "image": BARE_IMAGE,
            # A pod's own /tmp ends with it.
            "command": ["sh", "-c", f'exec {script} {results}/"$GROUP_RANK" /tmp/saves'],
            "resources": {"shm": "32Mi"},
            "pod_template": merge(with_host_programs(results), one_pod_per_machine(name)),
        }
        training = await start(client, worker, results / "1", name=name, checkpoint={"watch": "/tmp/saves"})
        await training.reaching(300)
        made = len(training.steps())
        await delete_pods(job, 1)

        def first_again() -> int | None:
            pairs = pairwise(training.steps()[made - 1 :])
            return next((after.number for before, after in pairs if after.number <= before.number), None)

        first = await eventually(first_again, within=PATIENCE)
        assert first % 50 == 1
        assert first > 100
        for rank in (0, 1):
            (results / str(rank) / "finish").touch()
        assert (await client.wait(name)).phase is JobPhase.SUCCEEDED
        assert [incident.culprit for incident in await training.incidents()] == [1]


@pytest.mark.long("cluster-faults")
async def test_a_requested_checkpoint_on_a_volume_is_loaded_by_torch_alone(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path, claim: tuple[str, Path]
) -> None:
    name, (volume, folder) = f"k-{secrets.token_hex(4)}", claim
    script = REPOSITORY / "examples" / "04-checkpoints" / "plain.py"
    async with perdure(cluster, job.namespace) as (server, client):
        worker = {
            "nodes": 2,
            "image": BARE_IMAGE,
            "command": ["torchrun", str(script), "--steps", "100000", "--out", str(results)],
            "pod_template": with_host_programs(results),
        }
        stored = {
            "volumes": [{"mount_path": "/checkpoints", "pvc": volume}],
            "checkpoint": {"storage": "file:///checkpoints/${job.name}", "every": 1_000_000},
        }
        training = await start(client, worker, results, name=name, **stored)
        await eventually(lambda: 10 in steps(training, 0), within=PATIENCE)
        requested = steps(training, 0)[-1]

        async def told(*arguments: str) -> str:
            answer = await asyncio.to_thread(
                subprocess.run,
                [*PERDURE, *arguments, "--namespace", job.namespace],
                env={**os.environ, "TEMPORAL_ADDRESS": server.address},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            assert answer.returncode == 0, answer.stderr
            return answer.stdout

        said = await told("checkpoint", name, "--wait")
        known = (await training.status()).checkpoint
        assert known.step is not None
        assert known.step > requested
        assert f"step {known.step:,} of {name} is durable" in said
        assert re.search(rf"step {known.step:,} durable, [0-9.]+ s old", await told("status", name))

        checkpoint = folder / name / known.folder
        loaded = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-I", "-c", LOAD, str(checkpoint)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert loaded.stdout.split() == [str(known.step), "True"], loaded.stderr

        generation = (await training.status()).generation
        await delete_pods(job, 0, 1)
        again = await restored(training, RestoreSource.STORAGE, after=generation)
        assert (again.restored_step or 0) >= known.step
        await client.cancel(name)
        assert (await client.wait(name)).phase is JobPhase.CANCELLED
