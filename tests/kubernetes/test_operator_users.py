"""Tests of the usual tools on TrainingJobs: kubectl scale and edit, Kubernetes' own roles, field managers."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client as TemporalClient

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.operator.resource import collection
from scripts.cluster.cluster import Cluster
from tests.kubernetes.chart import rendered
from tests.kubernetes.pods import TestCluster
from tests.kubernetes.test_deploy import kubectl_says
from tests.kubernetes.test_operator import (
    POLICIES,
    Operator,
    Resources,
    address_of,
    is_running,
    local_nodes,
    plural_of,
    resources,
    sleeping,
)
from tests.support.waiting import eventually

__all__ = ["local_nodes", "resources"]

RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture
async def refusing_changes(resources: Resources, helm: Path) -> AsyncIterator[None]:
    """The chart's policy for changes, which counts in the test's namespace only."""
    name = f"changes-{secrets.token_hex(4)}"
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": resources.namespace}}}
    paths: list[str] = []
    for policy in await rendered(helm, operator={"enabled": True}):
        if policy["metadata"]["name"].endswith("-changes"):
            policy["metadata"]["name"] = name
            if policy["kind"].endswith("Binding"):
                policy["spec"] |= {"policyName": name, "matchResources": here}
            path = f"{POLICIES}/{plural_of(policy)}"
            await resources.api.create(path, policy)
            paths.append(f"{path}/{name}")
    assert len(paths) == 2
    yield
    for path in paths:
        await resources.api.delete(path)


@pytest.mark.long("cluster-faults")
async def test_kubectl_scales_a_job_and_what_it_cannot_follow_is_refused_at_once(
    cluster: TestCluster,
    kubectl: Path,
    resources: Resources,
    refusing_changes: None,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    async def kubectl_in_namespace(*words: str) -> str:
        return await kubectl_says(kubectl, "-n", resources.namespace, *words, kubeconfig=cluster.kubeconfig)

    address, log = address_of(temporal_client), tmp_path / "operator.log"
    async with Operator(cluster.kubeconfig, resources.namespace, address, log, options=("--owners", "ignore")):
        await resources.apply("job", sleeping(nodes="1:2", env={"A": "1"}))
        started = await resources.until("job", is_running("2/2"))
        await kubectl_in_namespace("scale", "tj/job", "--replicas=1")
        await resources.until("job", is_running("1/1"))
        scale = await resources.api.get(f"{collection(resources.namespace)}/job/scale")
        assert scale is not None
        assert (scale["spec"], scale["status"]["replicas"]) == ({"replicas": 1}, 1)
        assert scale["status"]["selector"] == f"perdure.dev/uid={started.status.uid}"
        await kubectl_in_namespace("scale", "tj/job", "--replicas=0")
        await resources.until("job", lambda known: known.status.phase == "SUSPENDED")
        await kubectl_in_namespace("scale", "tj/job", "--replicas=2")
        again = await resources.until("job", is_running("2/2"))
        assert again.status.run_id == started.status.run_id

        async def refused() -> bool:
            # A policy counts a moment after it is installed.
            try:
                await resources.patch("job", {"env": {"A": "2"}})
            except KubernetesError as error:
                return "spec.env: cannot change once the job was started" in str(error)
            await resources.patch("job", {"env": {"A": "1"}})
            return False

        await eventually(refused)
        for change, field in (
            ({"retry": {"max_restarts": 3}}, "spec.retry: cannot change"),
            ({"env": None}, "spec.env: cannot change"),
            (
                {"roles": {"worker": {"command": ["sleep", "1"]}}},
                "only nodes, scaling and suspend of a role can change",
            ),
            (
                {"roles": {"worker": None, "other": {"nodes": 1, "command": ["a"]}}},
                "only nodes, scaling and suspend of a role can change",
            ),
        ):
            with pytest.raises(KubernetesError, match=field):
                await resources.patch("job", change)
        await resources.patch("job", {"replicas": None, "roles": {"worker": {"nodes": 1}}, "ttl_after_finished": "1h"})
        await resources.until("job", is_running("1/1"))

        thing = await resources.api.get(f"{collection(resources.namespace)}/job")
        assert thing is not None
        managers = {one["manager"] for one in thing["metadata"]["managedFields"] if one.get("subresource") == "status"}
        assert managers == {"perdure-operator"}
        await resources.delete("job")
        await resources.until_gone("job")


async def test_those_who_may_edit_or_view_a_namespace_may_do_so_with_its_jobs(
    own_cluster: Cluster, helm: Path, resources: Resources
) -> None:
    users = {role: f"{role}-{secrets.token_hex(4)}" for role in ("edit", "view")}
    made: list[str] = []
    for role in await rendered(helm, site=resources.namespace, operator={"enabled": True}):
        if role["kind"] == "ClusterRole" and "-trainingjob-" in role["metadata"]["name"]:
            await resources.api.create(f"{RBAC}/clusterroles", role)
            made.append(f"{RBAC}/clusterroles/{role['metadata']['name']}")
    assert len(made) == 2
    group = "rbac.authorization.k8s.io"
    for role, user in users.items():
        binding = {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": user},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        }
        await resources.api.create(f"{RBAC}/namespaces/{resources.namespace}/rolebindings", binding)
    editor = await KubernetesApi.connect(str(own_cluster.kubeconfig_of(users["edit"])))
    viewer = await KubernetesApi.connect(str(own_cluster.kubeconfig_of(users["view"])))
    try:

        async def created() -> dict[str, Any] | None:
            # The controller manager aggregates roles.
            try:
                await Resources(editor, resources.namespace).apply("job", sleeping())
            except KubernetesError:
                return None
            return await editor.get(f"{collection(resources.namespace)}/job")

        assert await eventually(created)
        assert await viewer.get(f"{collection(resources.namespace)}/job")
        with pytest.raises(KubernetesError, match="cannot delete resource"):
            await viewer.delete(f"{collection(resources.namespace)}/job")
        await editor.patch(f"{collection(resources.namespace)}/job/scale", {"spec": {"replicas": 1}})
        await editor.delete(f"{collection(resources.namespace)}/job")
    finally:
        await editor.close()
        await viewer.close()
        for path in made:
            await resources.api.delete(path)
