"""Tests of pods whose memory is raised while they run, by the real API server and kubelet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.contract import JobPhase, NodeResize, RaiseMemory
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE, PAUSE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually
from tests.system.site import PATIENCE

LONG = 240.0
"""Seconds for a job that starts torch three times."""
MI = 2**20
GI = 2**30

HUNGRY = """
import os
import time
from pathlib import Path

results = Path(RESULTS)
limit = int(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").read_text())
(results / f"{os.environ['HOSTNAME']} {limit // 2**20}").touch()
if os.environ["RANK"] == "1":
    needed = bytearray(NEEDED * 2**20)
    for place in range(0, len(needed), 4096):
        needed[place] = 1
(results / f"fits {os.environ['RANK']}").touch()
while len(list(results.glob("fits *"))) < 2:
    time.sleep(0.1)
"""
"""Rank 1 needs so many MiB beside what torch takes, whatever its container's limit, which both ranks write down."""


def resize_of(job: PodJob, memory: int) -> NodeResize:
    return NodeResize(**dict(job.ref()), memory=memory)


def training_of(pod: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in pod["status"]["containerStatuses"] if one["name"] == "training")


@pytest.mark.long("cluster-faults")
@pytest.mark.timeout(420)
async def test_a_running_pod_gets_more_memory_and_no_container_is_started_again(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob, results: Path
) -> None:
    command = ["sh", "-c", f"touch {results}/began; sleep 600"]
    job = job.changed(role(results, command=command, resources={"memory": "128Mi"}))
    await backend.create(job.request())
    await eventually((results / "began").exists, within=PATIENCE)
    before = await job.pod()
    assert before is not None
    assert await backend.resize(resize_of(job, 192 * MI)) == ""
    assert await backend.resize(resize_of(job, 192 * MI)) == "", "repeated"
    after = await job.pod()
    assert after is not None
    assert training_of(after)["resources"]["limits"]["memory"] == "192Mi"
    assert training_of(after)["containerID"] == training_of(before)["containerID"]
    assert training_of(after)["restartCount"] == 0

    refused = await backend.resize(resize_of(job, 4096 * GI))
    # The API server knows by itself what no machine of that size can have.
    assert "enough allocatable resources: memory" in refused
    await backend.delete(job.ref())
    assert await backend.resize(resize_of(job, 256 * MI)) == "its pod is gone"


def hungry(job: PodJob, results: Path, *, needed: int = 600, memory_max: str = "4Gi") -> dict[str, Any]:
    script = results / "hungry.py"
    script.write_text(HUNGRY.replace("RESULTS", repr(str(results))).replace("NEEDED", str(needed)))
    return {
        "nodes": 2,
        "image": BARE_IMAGE,
        "command": ["torchrun", str(script)],
        "resources": {"memory": "1Gi"},
        "scaling": {"memory_max": memory_max},
        "pod_template": with_host_programs(results),
    }


def limits(results: Path) -> dict[str, list[int]]:
    """The limits that each pod has had, in MiB."""
    found: dict[str, list[int]] = {}
    for path in results.glob("* *"):
        name, number = path.name.split()
        if name != "fits":
            found.setdefault(name, []).append(int(number))
    return {name: sorted(numbers) for name, numbers in found.items()}


@pytest.mark.long("cluster-faults")
@pytest.mark.timeout(420)
async def test_a_job_whose_rank_was_killed_for_memory_goes_on_in_the_same_pod(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        training = await start(client, hungry(job, results), results)
        result = await asyncio.wait_for(client.wait(training.name), LONG)
        assert result.phase is JobPhase.SUCCEEDED
        incident = (await training.incidents())[0]
        assert incident.rule == 'out-of-memory/3 "raise its memory where it runs"'
        [raised] = [one for one in incident.actions if isinstance(one, RaiseMemory)]
        assert (raised.in_place, raised.before, raised.memory) == ((1,), 1024 * MI, 1536 * MI)
        known = limits(results)
        assert len(known) == 2, "no pod was made anew"
        assert [1024, 1536] in known.values()


@pytest.mark.long("cluster-faults")
async def test_a_job_that_no_memory_within_its_limit_is_enough_for_stops_and_says_so(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        training = await start(client, hungry(job, results, needed=3000, memory_max="1280Mi"), results)
        result = await asyncio.wait_for(client.wait(training.name), LONG)
        assert result.phase is JobPhase.FAILED
        assert "more memory is not requested: it had 1280Mi, and scaling.memory_max is 1280Mi" in result.reason
        raised, stopped = await training.incidents()
        assert [one.memory for one in raised.actions if isinstance(one, RaiseMemory)] == [1280 * MI]
        assert stopped.rule.startswith("out-of-memory/2")
        assert [1024, 1280] in limits(results).values()


@pytest.fixture
async def crowded(own_cluster: Cluster, job: PodJob) -> str:
    """A machine whose memory other pods have requested, but for 2.5 GiB."""
    [first, *_] = own_cluster.nodes()
    node = await job.api.get(f"/api/v1/nodes/{first.name}")
    assert node is not None
    free = int(node["status"]["allocatable"]["memory"].removesuffix("Ki")) // 1024 - 2560
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "crowd"},
        "spec": {
            "nodeName": first.name,
            "containers": [{"name": "it", "image": PAUSE_IMAGE, "resources": {"requests": {"memory": f"{free}Mi"}}}],
        },
    }
    await job.api.create(job.pods_path, pod)
    return first.name


@pytest.mark.long("cluster-faults")
@pytest.mark.timeout(420)
async def test_a_pod_whose_machine_has_no_room_is_replaced_by_one_elsewhere(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path, crowded: str
) -> None:
    worker = hungry(job, results)
    term = {
        "weight": 1,
        "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [crowded]}]},
    }
    preferred = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    worker["pod_template"]["spec"]["affinity"] = preferred
    async with perdure(cluster, job.namespace) as (_, client):
        training = await start(client, worker, results)
        result = await asyncio.wait_for(client.wait(training.name), LONG)
        assert result.phase is JobPhase.SUCCEEDED
        incident = (await training.incidents())[0]
        assert incident.rule == 'out-of-memory/3 "raise its memory where it runs"'
        assert (
            "node 1 is replaced by one that requests 1536Mi of memory: its machine has no room" in incident.waited_for
        )
        assert [1536] in limits(results).values()
