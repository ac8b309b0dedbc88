"""Tests of what a real cluster makes of pods by its own defaults, with the chart's rights: of limits that no job has
stated, of names that follow readiness, and of pods on their machine's network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.contract import JobPhase
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY
from tests.kubernetes.pods import PodJob, TestCluster, marking, role
from tests.kubernetes.rights import Rights, chart_rights
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually


@pytest.fixture
async def rights(own_cluster: Cluster, helm: Path, job: PodJob) -> AsyncIterator[Rights]:
    async with chart_rights(helm, own_cluster, job.api, job.namespace) as rights:
        yield rights


@pytest.fixture
async def worker(cluster: TestCluster, rights: Rights) -> AsyncIterator[KubernetesBackend]:
    backend = cluster.backend(kubeconfig=rights.kubeconfig("worker"))
    yield backend
    await backend.close()


async def set_default_limit(job: PodJob, cpu: str) -> None:
    """Gives each container without a limit of its own this one."""
    path = f"/api/v1/namespaces/{job.namespace}/limitranges"
    limits = [{"type": "Container", "default": {"cpu": cpu}}]
    content = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": limits}}
    if await job.api.patch(f"{path}/small", {"spec": {"limits": limits}}) is None:
        await job.api.create(path, content)


async def test_a_limit_that_a_namespace_sets_by_itself_is_waited_for_or_told(
    worker: KubernetesBackend, job: PodJob
) -> None:
    job = job.changed(role(resources={"cpu": "200m"}))
    await set_default_limit(job, "100m")

    async def refusal() -> NodeNotYet | None:
        # Admission reads a new LimitRange a moment later.
        try:
            await worker.create(job.request())
        except NodeNotYet as waiting:
            return waiting
        await worker.delete(job.ref(grace=0))
        return None

    waiting = await eventually(refusal)
    assert not waiting.queued
    assert "a LimitRange or an admission webhook of the cluster gives its pod a value that is invalid" in str(waiting)
    assert "must be less than or equal to cpu limit of 100m" in str(waiting)
    await set_default_limit(job, "300m")

    async def told() -> bool:
        try:
            created = await worker.create(job.request())
        except NodeNotYet:
            return False
        return "limits.cpu of training is 300m" in created.altered

    await eventually(told)
    await worker.delete(job.ref(grace=0))


async def test_a_server_keeps_its_name_while_it_is_unready_and_not_once_it_is_to_go(
    own_cluster: Cluster, worker: KubernetesBackend, job: PodJob
) -> None:
    assert job.marks
    probe = {"name": "training", "readinessProbe": {"exec": {"command": ["false"]}, "periodSeconds": 1}}
    deaf = ["sh", "-c", f"trap '' TERM; touch {job.marks}/$HOSTNAME; while true; do sleep 1; done"]
    server = marking(job.marks, rendezvous=None, ready={"port": 6000}, pod_template={"spec": {"containers": [probe]}})
    job = job.changed(server | {"command": deaf}, timing={"processes": {"stop_grace": "8s"}})
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{job.namespace}/endpointslices"

    async def addresses() -> list[str]:
        found = await job.api.list(slices)
        return [address for one in found for end in one["endpoints"] or () for address in end["addresses"]]

    await worker.create(job.request())
    # Its agent has a container of its own, which is ready.
    await eventually(addresses)
    pod = await job.pod()
    assert pod
    assert await addresses() == [pod["status"]["podIP"]]
    conditions = {one["type"]: one["status"] for one in pod["status"]["conditions"]}
    assert conditions["Ready"] == "False"
    deleting = asyncio.create_task(worker.delete(job.ref(grace=10)))

    async def nameless() -> bool:
        return await addresses() == []

    await eventually(nameless)
    assert await job.pod(), "it still runs"
    assert not deleting.done()
    await job.api.delete(f"{job.pods_path}/{job.name()}", grace=0)
    await deleting


async def test_a_job_on_its_machines_network_joins_and_ends(
    cluster: TestCluster, rights: Rights, job: PodJob, tmp_path: Path
) -> None:
    policy = merge(yaml.safe_load(SITE_POLICY), {"host_namespaces": ["network"]})
    on_host: dict[str, Any] = {"spec": {"hostNetwork": True}}
    async with perdure(
        cluster, job.namespace, kubeconfig=rights.kubeconfig("worker"), policy=SitePolicy.parse(yaml.safe_dump(policy))
    ) as (_, client):
        given = role(rendezvous="env", command=["true"], pod_template=on_host)
        training = await start(client, given, tmp_path)
        result = await client.wait(training.name)
        assert result.phase is JobPhase.SUCCEEDED, result
