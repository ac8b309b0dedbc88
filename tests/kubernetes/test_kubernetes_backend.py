"""Tests of the Kubernetes backend with a real API server and real kubelets: its promises, whatever happens to pods."""

from __future__ import annotations

import asyncio
import time

import pytest

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.contract import NodeEventKind
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.support.watching import watching

RUNNING, GONE, PENDING = NodeEventKind.RUNNING, NodeEventKind.GONE, NodeEventKind.PENDING


async def test_one_node_however_often_it_is_created(
    own_cluster: Cluster, cluster: TestCluster, backend: KubernetesBackend, job: PodJob
) -> None:
    other = cluster.backend()
    request = job.request()
    async with watching(backend, job.watch()) as watch:
        created = await asyncio.gather(*(one.create(request) for one in (backend, other, backend, other)))
        assert {one.name for one in created} == {request.name}
        await watch.until(RUNNING)
    [pod] = await job.pods()
    [owner] = pod["metadata"]["ownerReferences"]
    assert (owner["name"], owner["controller"]) == (f"perdure-made-up-{job.uid}", True)
    described = await backend.describe(job.ref())
    assert described is not None
    assert described.kind is RUNNING
    assert await backend.describe(job.ref(rank=1)) is None
    # A new watch begins with what is.
    async with watching(other, job.watch()) as again:
        await again.until(RUNNING)
    await other.close()


async def test_deleting_waits_for_the_end_and_may_be_repeated(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    await backend.delete(job.ref(rank=7))
    async with watching(backend, job.watch()) as watch:
        await asyncio.gather(backend.create(job.request(0)), backend.create(job.request(1)))
        await asyncio.gather(job.command_started(), job.command_started(1))
        await backend.delete(job.ref(), job.ref(1), job.ref(7))
        assert await job.pods() == []
        gone = await watch.until(GONE)
        assert "deleted" in gone.reason
        labels = "app.kubernetes.io/managed-by=perdure"
        assert len(await job.api.list(job.anchors_path, labels=labels)) == 1
        await backend.delete(job.ref(winding_down=True))
        assert await job.api.list(job.anchors_path, labels=labels) == []


async def test_a_deleted_pod_is_a_node_that_is_gone(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    async with watching(backend, job.watch()) as watch:
        await asyncio.gather(backend.create(job.request(0)), backend.create(job.request(1)))
        await asyncio.gather(job.command_started(), job.command_started(1))
        await job.api.delete(f"{job.pods_path}/{job.name(1)}")
        await watch.until(GONE, rank=1)
        assert not [event for event in watch.events if event.kind is GONE and event.rank == 0]
        # A new incarnation does not wait for what is left of the last one.
        await backend.create(job.request(1, incarnation=2))
        await watch.until(RUNNING, rank=1, incarnation=2)


@pytest.mark.long("cluster-faults")
async def test_the_next_watch_reports_what_was_deleted_while_none_ran(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    await asyncio.gather(backend.create(job.request(0)), backend.create(job.request(1)))
    await asyncio.gather(job.command_started(), job.command_started(1))
    await backend.delete(job.ref(1))
    async with watching(backend, job.watch(known=[(0, 1), (1, 1)])) as watch:
        gone = await watch.until(GONE, rank=1)
        assert (gone.incarnation, gone.reason) == (1, "its pod was deleted while no watch ran")
        await watch.until(RUNNING, rank=0)
        assert not [event for event in watch.events if event.kind is GONE and event.rank == 0]


async def test_an_eviction_is_told_as_one(own_cluster: Cluster, backend: KubernetesBackend, job: PodJob) -> None:
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await job.command_started()
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": job.name()}}
        await job.api.create(f"{job.pods_path}/{job.name()}/eviction", eviction)
        await watch.until(GONE, saying="drain of its machine")


async def test_memory_beyond_the_limit_is_told_with_the_limit(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    # Less than a Python needs: the launcher itself is the first to take too much.
    job = job.changed(role(resources={"memory": "6Mi"}))
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        gone = await watch.until(GONE)
        assert "ran out of memory; its limit is 6Mi (OOMKilled)" in gone.reason


async def test_what_no_machine_can_take_waits_with_the_scheduler_s_words(
    backend: KubernetesBackend, job: PodJob
) -> None:
    job = job.changed(role(resources={"cpu": 1000}))
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await watch.until(PENDING, saying="Insufficient cpu")


async def test_an_image_that_is_not_there_is_told_while_it_waits(backend: KubernetesBackend, job: PodJob) -> None:
    job = job.changed(role(image="localhost/perdure/none:1", image_pull_policy="Never"))
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await watch.until(PENDING, saying="ErrImageNeverPull")


async def test_an_image_without_python_is_reported(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    job = job.changed(role() | {"pod_template": {}})
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        gone = await watch.until(GONE)
        assert "neither python3 nor python is on PATH in this image" in gone.reason


async def test_what_the_api_server_will_never_take_is_refused_with_its_words(
    backend: KubernetesBackend, job: PodJob
) -> None:
    with pytest.raises(NodeRefused, match="dnsPolicy: Unsupported value"):
        await backend.create(job.changed(role(pod_template={"spec": {"dnsPolicy": "Sideways"}})).request())
    with pytest.raises(NodeRefused, match="command of the container training"):
        await backend.create(
            job.changed(role(pod_template={"spec": {"containers": [{"name": "training", "command": ["x"]}]}})).request()
        )
    elsewhere = PodJob(job.api, "no-such-namespace")
    with pytest.raises(NodeRefused, match="namespace no-such-namespace does not exist"):
        await backend.create(elsewhere.request())


async def test_a_quota_that_is_used_up_is_not_the_end(backend: KubernetesBackend, job: PodJob) -> None:
    await job.allow_no_pods()
    with pytest.raises(NodeNotYet, match="quota none is used up"):
        await backend.create(job.request())


@pytest.mark.long("cluster-faults")
async def test_the_watch_goes_on_when_the_api_server_was_away(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await job.command_started()
        await asyncio.to_thread(own_cluster.kill_api_server)
        missed = time.monotonic()
        await asyncio.to_thread(own_cluster.start_api_server)
        await job.api.delete(f"{job.pods_path}/{job.name()}")
        await watch.until(GONE)
        print(f"noticed {time.monotonic() - missed:.1f} s after the API server was killed")
        assert [event.kind for event in watch.events].count(GONE) == 1
