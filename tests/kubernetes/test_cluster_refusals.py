"""Tests of jobs whose pods a real API server refuses: by an admission policy, or for lack of the worker's rights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeNotYet, RemovalDenied
from perdure.activities.nodes.kubernetes.leftovers import keep_tidy
from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import JobPhase
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually
from tests.system.site import SCRIPT

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
RBAC = "rbac.authorization.k8s.io"
FROZEN = "the namespace is frozen"


@asynccontextmanager
async def no_new_pods(job: PodJob) -> AsyncIterator[None]:
    """An admission policy that denies new pods in the job's namespace, for as long as the context is open."""
    name = f"freeze-{secrets.token_hex(4)}"
    own: dict[str, Any] = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "false", "message": FROZEN}],
    }
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": job.namespace}}},
    }
    policies, bindings = f"{ADMISSION}/validatingadmissionpolicies", f"{ADMISSION}/validatingadmissionpolicybindings"
    await job.api.create(policies, own | {"kind": "ValidatingAdmissionPolicy", "spec": policy})
    try:
        await job.api.create(bindings, own | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding})
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "probe"},
            "spec": {"containers": [{"name": "one", "image": "localhost/none"}]},
        }

        async def holds() -> bool:
            try:
                await job.api.create(job.pods_path, pod, dry_run=True)
            except KubernetesError as error:
                return FROZEN in error.message
            return False

        await eventually(holds, what="the policy holds")
        yield
    finally:
        await job.api.delete(f"{bindings}/{name}")
        await job.api.delete(f"{policies}/{name}")


class Rights:
    """The rights of a worker of its own in one namespace."""

    def __init__(self, job: PodJob) -> None:
        self.user = f"worker-{secrets.token_hex(4)}"
        self._job = job
        self._path = f"/apis/{RBAC}/v1/namespaces/{job.namespace}"

    async def give(self) -> None:
        """Binds the role, which is created if need be."""
        own: dict[str, Any] = {"apiVersion": f"{RBAC}/v1", "metadata": {"name": self.user}}
        rules = [{"apiGroups": [""], "resources": ["pods", "configmaps"], "verbs": ["*"]}]
        if await self._job.api.get(f"{self._path}/roles/{self.user}") is None:
            await self._job.api.create(f"{self._path}/roles", own | {"kind": "Role", "rules": rules})
        subject = {"apiGroup": RBAC, "kind": "User", "name": self.user}
        binding = {"roleRef": {"apiGroup": RBAC, "kind": "Role", "name": self.user}, "subjects": [subject]}
        await self._job.api.create(f"{self._path}/rolebindings", own | {"kind": "RoleBinding", **binding})

    async def take(self) -> None:
        """Removes the binding."""
        await self._job.api.delete(f"{self._path}/rolebindings/{self.user}")


def trains(results: Path) -> dict[str, Any]:
    """A role that needs one node, and trains with two if it can."""
    return {
        "nodes": "1:2",
        "image": BARE_IMAGE,
        "command": ["torchrun", str(SCRIPT), str(results)],
        "pod_template": with_host_programs(results),
    }


async def delete_node(job: PodJob, rank: int) -> None:
    names = [pod["metadata"]["name"] for pod in await job.pods() if f"-worker-{rank}-" in pod["metadata"]["name"]]
    # On a busy machine an earlier incarnation may still be there.
    await job.api.delete(f"{job.pods_path}/{max(names)}", grace=0)


@pytest.mark.long("cluster-faults")
async def test_an_admission_policy_that_denies_pods_does_not_end_a_job_that_has_enough_nodes(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        training = await start(client, trains(results), results)
        await training.running(nodes=2)
        async with no_new_pods(job):
            await delete_node(job, 1)
            status = await training.until(lambda known: known.uncreated == (1,) and known.phase is JobPhase.RUNNING)
            assert status.nodes == 1
            assert FROZEN in status.refusal
            await training.stepping(generation=status.generation, ranks=1)
            entry = (await training.incidents())[-1]
            assert (entry.title, entry.over_at) == ("node 1 cannot be created", None)
        status = await training.running(nodes=2)
        await training.stepping(generation=status.generation, ranks=2)
        assert not status.uncreated
        assert any(one.title.startswith("node 1 could not be created for ") for one in await training.incidents())
        assert status.restarts == 0
        await client.cancel(training.name)
        await client.wait(training.name)


@pytest.mark.long("cluster-faults")
async def test_a_job_that_ends_without_its_workers_rights_leaves_nothing_once_they_are_back(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    rights = Rights(job)
    await rights.give()
    kubeconfig = own_cluster.kubeconfig_of(rights.user)
    async with perdure(cluster, job.namespace, kubeconfig=kubeconfig) as (server, client):
        sleeping = await start(client, role(), tmp_path)
        await sleeping.until(lambda known: "joined" in known.next_action)
        await rights.take()
        await client.cancel(sleeping.name)
        result = await client.wait(sleeping.name)
        assert result.phase is JobPhase.CANCELLED
        assert not await job.nothing_left()

        async def ended_by_themselves() -> bool:
            return all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in await job.pods())

        await eventually(ended_by_themselves, within=120, what="the pods end")
        await rights.give()
        api, temporal = await KubernetesApi.connect(str(kubeconfig)), await server.client()
        sweep = asyncio.create_task(keep_tidy(api, temporal, interval=timedelta(seconds=1), young=timedelta()))
        await eventually(job.nothing_left, within=60, what="what is left is swept")
        sweep.cancel()
        await api.close()


async def test_a_worker_without_rights_waits_for_them(own_cluster: Cluster, cluster: TestCluster, job: PodJob) -> None:
    rights = Rights(job)
    worker = cluster.backend(kubeconfig=own_cluster.kubeconfig_of(rights.user))
    with pytest.raises(NodeNotYet, match=f'User "{rights.user}" cannot create resource "configmaps"') as refused:
        await worker.create(job.request())
    assert not refused.value.queued
    with pytest.raises(RemovalDenied, match="cannot list resource"):
        await worker.delete(job.ref(winding_down=True))
    await rights.give()
    await worker.create(job.request())
    await worker.delete(job.ref(winding_down=True))
    assert await job.nothing_left()
    await worker.close()


async def test_a_quota_that_counts_limits_of_processor_time_takes_the_pods_of_a_job_that_states_its_own(
    cluster: TestCluster, job: PodJob
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "cpu"}}
    path = f"/api/v1/namespaces/{job.namespace}/resourcequotas"
    await job.api.create(path, quota | {"spec": {"hard": {"limits.cpu": "20", "requests.memory": "20Gi"}}})

    async def counted() -> bool:
        found = await job.api.get(f"{path}/cpu")
        return bool(found and found.get("status", {}).get("hard"))

    await eventually(counted)
    backend = cluster.backend()
    with pytest.raises(NodeNotYet, match=r"must specify limits\.cpu for: training; requests\.memory for: training"):
        await backend.create(job.request())
    training = {"name": "training", "resources": {"requests": {"memory": "64Mi"}, "limits": {"cpu": "4"}}}
    small = job.changed(role(pod_template={"spec": {"containers": [training]}}))
    await backend.create(small.request())
    assert await small.pod() is not None
    await backend.delete(small.ref(winding_down=True))
    await backend.close()
