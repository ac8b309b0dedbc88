"""Tests of presets that allow more than the site's policy, on a real cluster: RBAC decides for whom."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace

LOCKING = {"spec": {"containers": [{"name": "training", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}]}}
RBAC = "rbac.authorization.k8s.io"


@asynccontextmanager
async def worker(cluster: TestCluster, presets_namespace: str) -> AsyncIterator[KubernetesBackend]:
    settings = KubernetesSettings(
        agent_image=cluster.agent_image, presets_namespace=presets_namespace, policy=SitePolicy()
    )
    backend = KubernetesBackend(settings, kubeconfig=cluster.kubeconfig)
    yield backend
    await backend.close()


async def preset(site: PodJob, policy: dict[str, Any]) -> str:
    """Makes a preset in the site's namespace; returns its name."""
    name = f"efa-{secrets.token_hex(4)}"
    metadata = {"name": f"preset-{name}", "labels": {"perdure.dev/runtime": name}}
    data = {"preset.yaml": json.dumps({"policy": policy})}
    content = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    await site.api.create(site.anchors_path, content)
    return name


async def let_use(site: PodJob, name: str, namespace: str) -> None:
    """Grants a preset to the service accounts of a namespace."""
    rule = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [f"preset-{name}"], "verbs": ["use"]}
    own = {"apiVersion": f"{RBAC}/v1", "metadata": {"name": name}}
    path = f"/apis/{RBAC}/v1/namespaces/{site.namespace}"
    await site.api.create(f"{path}/roles", {**own, "kind": "Role", "rules": [rule]})
    group = {"apiGroup": RBAC, "kind": "Group", "name": f"system:serviceaccounts:{namespace}"}
    reference = {"apiGroup": RBAC, "kind": "Role", "name": name}
    binding = {**own, "kind": "RoleBinding", "roleRef": reference, "subjects": [group]}
    await site.api.create(f"{path}/rolebindings", binding)


def asking_for(job: PodJob, preset: str | None, template: dict[str, Any]) -> PodJob:
    role = {"nodes": 1, "image": BARE_IMAGE, "command": ["sleep", "600"], "pod_template": template}
    return job.changed(role, runtime=preset)


async def test_a_preset_widens_the_policy_where_rbac_lets_it_be_used(cluster: TestCluster, job: PodJob) -> None:
    async with job_in_a_namespace(cluster) as site:
        name = await preset(site, {"capabilities": ["IPC_LOCK"]})
        wanting = asking_for(job, name, LOCKING)
        async with worker(cluster, site.namespace) as backend:
            with pytest.raises(NodeRefused) as refused:
                await backend.create(wanting.request())
            assert '"IPC_LOCK"' in str(refused.value)
            assert (
                f'what the preset "{name}" adds to that policy does not hold in the namespace {job.namespace}, whose '
                f"service accounts may not use the ConfigMap {site.namespace}/preset-{name}"
            ) in str(refused.value)
            assert await job.nothing_left()

        await let_use(site, name, job.namespace)
        async with worker(cluster, site.namespace) as backend, job_in_a_namespace(cluster) as elsewhere:
            await backend.create(wanting.request())
            pod = await wanting.pod()
            assert pod is not None
            (training,) = [one for one in pod["spec"]["containers"] if one["name"] == "training"]
            assert training["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
            # What it does not add, and other namespaces, and jobs without it, have the site's policy.
            for other in (
                asking_for(job, name, {"spec": {"hostPID": True}}),
                asking_for(elsewhere, name, LOCKING),
                asking_for(job, None, LOCKING),
                asking_for(job, "no-such-preset", LOCKING),
            ):
                with pytest.raises(NodeRefused, match="the site's policy allows none"):
                    await backend.create(other.request())
            await backend.delete(wanting.ref(winding_down=True))


async def test_a_wrong_addition_allows_nothing(cluster: TestCluster, job: PodJob) -> None:
    async with job_in_a_namespace(cluster) as site, worker(cluster, site.namespace) as backend:
        for policy, why in (({"capabilities": ["!X"]}, "only includes more"), ({"max_gpus": 8}, "max_gpus")):
            name = await preset(site, policy)
            await let_use(site, name, job.namespace)
            with pytest.raises(NodeRefused, match=why):
                await backend.create(asking_for(job, name, LOCKING).request())
