"""Tests of machines that do not answer, on a real cluster and with the chart's rights: what of a pod stays, for how
long, and where its successors go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.activities.nodes.kubernetes import KubernetesBackend, deletion
from perdure.base.kubernetes import KubernetesApi
from perdure.contract import NodeEventKind
from scripts.cluster.cluster import Cluster
from scripts.cluster.node import Node
from tests.kubernetes.pods import PodJob, TestCluster, marking, needing, role
from tests.kubernetes.rights import chart_rights
from tests.kubernetes.test_kubernetes_adversity import UNREACHABLE, has_condition
from tests.support.waiting import eventually
from tests.support.watching import watching

RUNNING = NodeEventKind.RUNNING
PATIENCE = 240
"""Seconds: kubelets that start again, and control planes that lose them, take a minute where nothing else runs."""
RACK = "test.example/rack"


@pytest.fixture
async def worker(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob
) -> AsyncIterator[KubernetesBackend]:
    """A worker's backend with the chart's rights in the job's namespace."""
    async with chart_rights(helm, own_cluster, job.api, job.namespace) as rights:
        backend = cluster.backend(kubeconfig=rights.kubeconfig("worker"))
        yield backend
        await backend.close()


async def machine_of(own_cluster: Cluster, job: PodJob, rank: int = 0, incarnation: int = 1) -> Node:
    found: list[Node] = []

    async def scheduled() -> bool:
        pod = await job.pod(rank, incarnation)
        name = pod and pod["spec"].get("nodeName")
        found[:] = [node for node in own_cluster.nodes() if node.name == name]
        return bool(found)

    await eventually(scheduled)
    return found[0]


@asynccontextmanager
async def stopped_kubelet(machine: Node, api: KubernetesApi) -> AsyncIterator[None]:
    await asyncio.to_thread(machine.kill_kubelet)
    try:
        yield
    finally:
        await asyncio.to_thread(machine.start_kubelet)
        await eventually(lambda: has_condition(api, machine, "Ready", "True"), within=PATIENCE)


async def test_a_pod_that_had_not_started_on_a_dead_machine_delays_the_end_of_its_job_for_a_bounded_time(
    own_cluster: Cluster, worker: KubernetesBackend, job: PodJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "OVERDUE", timedelta(seconds=3))
    # Its machine has it, and waits for the volume, as for an image.
    job = job.changed(role(pod_template=needing("missing")))
    await worker.create(job.request())
    machine = await machine_of(own_cluster, job)
    async with stopped_kubelet(machine, job.api):
        async with asyncio.timeout(PATIENCE):
            left = await worker.delete(job.ref(grace=0.5, winding_down=True))
        pod = await job.pod()
        assert f"its machine {machine.name} has not ended it" in left[job.ref().name]
        assert pod is None or pod["metadata"]["deletionTimestamp"]
        # The cluster removes the rest with its owner, and with its machine.
        assert await job.api.list(job.anchors_path, labels="app.kubernetes.io/managed-by=perdure") == []
        assert await job.pod(), "nothing else has removed it"

    async def gone() -> bool:
        return await job.pod() is None

    await eventually(gone, within=PATIENCE)


@pytest.mark.long("cluster-faults")
async def test_pods_of_a_lost_rack_stay_until_their_job_replaces_them_in_another(
    own_cluster: Cluster, worker: KubernetesBackend, job: PodJob
) -> None:
    """Kubernetes deletes pods from a machine whose kubelet is away, but those that tolerate it."""
    marks = job.marks
    assert marks
    for machine in own_cluster.nodes():
        await job.api.patch(f"/api/v1/nodes/{machine.name}", {"metadata": {"labels": {RACK: machine.name}}})
    job = job.changed(marking(marks, nodes=2, topology={"required": RACK}))
    async with watching(worker, job.watch()) as watch:
        for rank in (0, 1):
            await worker.create(job.request(rank))
            await job.command_started(rank)
        machine = await machine_of(own_cluster, job)
        assert (await machine_of(own_cluster, job, 1)).name == machine.name
        # Of another job, whose template says for how long it stays.
        limited = {"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
        onto = {"spec": {"nodeSelector": {"kubernetes.io/hostname": machine.name}, "tolerations": [limited]}}
        leaves = PodJob(job.api, job.namespace, marking(marks, pod_template=onto), marks=marks)
        await worker.create(leaves.request())
        await leaves.command_started()
        async with stopped_kubelet(machine, job.api):
            await watch.until(RUNNING, saying=f"{machine.name} does not answer", within=PATIENCE)

            async def condemned() -> bool:
                pod = await leaves.pod()
                return bool(pod and pod["metadata"].get("deletionTimestamp"))

            await eventually(condemned, within=PATIENCE)
            for rank in (0, 1):
                pod = await job.pod(rank)
                assert pod
                assert "deletionTimestamp" not in pod["metadata"]
            for rank in (0, 1):
                await asyncio.wait_for(worker.delete(job.ref(rank, replaced=True)), PATIENCE)
            for rank in (0, 1):
                await worker.create(job.request(rank, incarnation=2))
                await watch.until(RUNNING, rank=rank, incarnation=2, within=PATIENCE)
                assert (await machine_of(own_cluster, job, rank, 2)).name != machine.name
            assert len(await job.pods()) == 5, "those of the lost rack are still objects"
