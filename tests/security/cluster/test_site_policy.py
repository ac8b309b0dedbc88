"""Tests of jobs that bypass the client's checks and request more of a real cluster than its site allows."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.client.client import Client
from perdure.contract import JobPhase, JobResult
from perdure.contract.names import WORKER_TASK_QUEUE, job_workflow_id
from scripts.cluster.host_programs import SITE_POLICY
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure
from tests.support.temporal_server import DevServer

ESCAPE = {
    "spec": {
        "hostPID": True,
        "containers": [
            {
                "name": "training",
                "securityContext": {"privileged": True},
                "volumeMounts": [{"name": "disk", "mountPath": "/disk"}],
            }
        ],
        "volumes": [{"name": "disk", "hostPath": {"path": "/"}}],
    }
}
"""A pod template that reads the machine's disk, with every Secret and key on it."""


async def started(server: DevServer, namespace: str, role: dict[str, Any]) -> JobResult:
    """Starts a job with direct access to Temporal; returns its result."""
    temporal, name = await server.client(), f"attack-{secrets.token_hex(3)}"
    spec = {
        "name": name,
        "namespace": namespace,
        "backend": "kubernetes",
        "roles": {"worker": {"nodes": 1, "image": "localhost/none", "command": ["sh", "-c", "id"], **role}},
    }
    workflow_id = job_workflow_id(namespace, name)
    await temporal.start_workflow("TrainingJob", spec, id=workflow_id, task_queue=WORKER_TASK_QUEUE)
    async with Client(address=server.address, namespace=namespace) as client:
        return await client.wait(name)


async def test_a_privileged_pod_with_the_hosts_disk_is_refused_once_by_name(cluster: TestCluster, job: PodJob) -> None:
    async with perdure(cluster, job.namespace, policy=SitePolicy()) as (server, client):
        result = await started(server, job.namespace, {"pod_template": ESCAPE})
        assert result.phase is JobPhase.FAILED
        assert "spec.hostPID: got true; the site's policy allows none (host_namespaces)" in result.reason
        assert "spec.containers.training.securityContext.privileged: got true" in result.reason
        assert 'spec.volumes.disk.hostPath.path: got "/"; the site\'s policy allows none (host_paths)' in result.reason
        assert result.restarts == 0, "what is refused for good is not tried again"
        assert await job.nothing_left()
        assert client


async def test_the_clusters_own_namespace_is_never_touched(cluster: TestCluster, job: PodJob) -> None:
    async with perdure(cluster, "kube-system", policy=SitePolicy()) as (server, _):
        result = await started(server, "kube-system", {})
        assert result.phase is JobPhase.FAILED
        assert 'namespace: got "kube-system"; the site\'s policy allows *, !kube-* (namespaces)' in result.reason
        ours = "app.kubernetes.io/managed-by=perdure"
        for kind in ("pods", "configmaps"):
            assert await job.api.list(f"/api/v1/namespaces/kube-system/{kind}", labels=ours) == []


async def test_a_namespace_has_room_for_so_many_nodes(cluster: TestCluster, job: PodJob) -> None:
    policy = SitePolicy.parse(SITE_POLICY).model_copy(update={"max_nodes": 1})
    backend = KubernetesBackend(
        KubernetesSettings(agent_image=cluster.agent_image, policy=policy), kubeconfig=cluster.kubeconfig
    )
    try:
        await backend.create(job.request(0))
        await backend.create(job.request(0))
        with pytest.raises(NodeNotYet, match=r"have 2 nodes, and the site's policy allows 1 \(max_nodes\)"):
            await backend.create(job.request(1))
        await backend.delete(job.ref(0))
        await backend.create(job.request(1))
        await backend.delete(job.ref(1))
        larger = job.request(2).model_copy(
            update={"spec": job.spec.model_copy(update={"roles": {"worker": _with_nodes(job, 2)}})}
        )
        with pytest.raises(NodeRefused, match="the job needs 2 nodes"):
            await backend.create(larger)
    finally:
        await backend.close()


async def test_workers_that_create_pods_at_the_same_time_share_one_limit(cluster: TestCluster, job: PodJob) -> None:
    policy = SitePolicy.parse(SITE_POLICY).model_copy(update={"max_nodes": 3})
    settings = KubernetesSettings(agent_image=cluster.agent_image, policy=policy)
    workers = [KubernetesBackend(settings, kubeconfig=cluster.kubeconfig) for _ in range(4)]

    async def created(rank: int) -> bool:
        try:
            await workers[rank % len(workers)].create(job.request(rank))
        except NodeNotYet:
            return False
        return True

    try:
        assert sum(await asyncio.gather(*map(created, range(12)))) == 3
        assert len(await job.pods()) == 3
        # Nodes that had no room are told so again, and the others are there already.
        assert sum(await asyncio.gather(*map(created, range(12)))) == 3
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))


async def test_a_pod_that_cannot_be_created_leaves_its_place(cluster: TestCluster, job: PodJob) -> None:
    policy = SitePolicy.parse(SITE_POLICY).model_copy(update={"max_nodes": 1})
    settings = KubernetesSettings(agent_image=cluster.agent_image, policy=policy)
    backend = KubernetesBackend(settings, kubeconfig=cluster.kubeconfig)
    try:
        with pytest.raises(NodeRefused, match="dnsPolicy"):
            await backend.create(job.changed(role(pod_template={"spec": {"dnsPolicy": "Sideways"}})).request(5))
        await backend.create(job.request(0))
    finally:
        await backend.close()


def _with_nodes(job: PodJob, nodes: int) -> Any:
    (role,) = job.spec.roles.values()
    return type(role).model_validate({**role.model_dump(exclude_unset=True), "nodes": nodes})
