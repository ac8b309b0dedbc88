"""Tests that the operator survives the loss of a namespace, and of the resource's definition, on a real API server."""

from __future__ import annotations

import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from temporalio.client import Client as TemporalClient

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.operator.definition import PATH
from perdure.operator.resource import collection
from scripts.cluster.cluster import Cluster
from tests.docs.commands import COMMANDS
from tests.kubernetes.chart import rendered
from tests.kubernetes.pods import TestCluster
from tests.kubernetes.test_deploy import kubectl_says
from tests.kubernetes.test_operator import (
    DEFINITION,
    DEFINITIONS,
    Operator,
    Resources,
    address_of,
    is_running,
    is_the_operator_s,
    local_nodes,
    resources,
    runs_of,
    sleeping,
)
from tests.support.allocation import REPOSITORY
from tests.support.temporal_server import free_port
from tests.support.waiting import eventually

__all__ = ["local_nodes", "resources"]

RBAC = "/apis/rbac.authorization.k8s.io/v1"


class Account:
    """A user with the operator's rights of the chart, namespace by namespace."""

    def __init__(self, api: KubernetesApi, helm: Path) -> None:
        self.name = f"operator-{secrets.token_hex(4)}"
        self._api = api
        self._helm = helm

    async def may_serve(self, namespace: str) -> None:
        objects = await rendered(self._helm, operator={"enabled": True}, jobNamespaces=[namespace])
        (role,) = [one for one in objects if is_the_operator_s(one, "Role")]
        (binding,) = [one for one in objects if is_the_operator_s(one, "RoleBinding")]
        binding["subjects"] = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": self.name}]
        await self._api.create(f"{RBAC}/namespaces/{namespace}/roles", role)
        await self._api.create(f"{RBAC}/namespaces/{namespace}/rolebindings", binding)


@pytest.fixture
async def vision(resources: Resources) -> AsyncIterator[str]:
    """Another namespace, which the test deletes."""
    name = f"vision-{secrets.token_hex(4)}"
    await make_namespace(resources.api, name)
    yield name
    await resources.api.delete(f"/api/v1/namespaces/{name}")


async def make_namespace(api: KubernetesApi, name: str) -> None:
    content = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await api.create("/api/v1/namespaces", content)


async def probe(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def readiness(port: int, *words: str, status: int) -> str:
    """Returns the report of the probe once it has this status and these words."""

    async def said() -> str | None:
        try:
            found, text = await probe(port, "/readyz")
        except aiohttp.ClientError:
            return None
        return text if found == status and all(word in text for word in words) else None

    return await eventually(said)


@pytest.mark.long("cluster-faults")
async def test_a_namespace_that_is_deleted_leaves_the_others_served(
    own_cluster: Cluster,
    cluster: TestCluster,
    helm: Path,
    resources: Resources,
    vision: str,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    api, account, port = resources.api, Account(resources.api, helm), free_port()
    for namespace in (resources.namespace, vision):
        await account.may_serve(namespace)
    kubeconfig = own_cluster.kubeconfig_of(account.name)
    options = ("--namespace", vision, "--owners", "ignore", "--health-port", str(port))
    address = address_of(temporal_client)

    async def gone() -> bool:
        return await api.get(f"/api/v1/namespaces/{vision}") is None

    async with Operator(
        kubeconfig, resources.namespace, address, tmp_path / "operator.log", options=options
    ) as operator:
        await readiness(port, f"serving {resources.namespace}, {vision}\n", status=200)
        await resources.apply("before", sleeping())
        await resources.until("before", is_running("1/1"))

        await api.delete(f"/api/v1/namespaces/{vision}")
        await eventually(gone)
        # The API server ends no watch for that. A new operator, as an upgrade starts, has to open its own.
        await operator.end(signal.SIGTERM)
        await operator.start()
        await readiness(port, f"serving {resources.namespace}\n", f"not serving {vision}: forbidden", status=200)
        await resources.apply("after", sleeping())
        await resources.until("after", is_running("1/1"))
        assert (await probe(port, "/healthz"))[0] == 200
        await make_namespace(api, vision)
        await account.may_serve(vision)
        await readiness(port, f"serving {resources.namespace}, {vision}\n", status=200)
        back = Resources(api, vision)
        await back.apply("back", sleeping())
        await back.until("back", is_running("1/1"))
        for one, name in ((back, "back"), *((resources, name) for name in ("before", "after"))):
            await one.delete(name)
            await one.until_gone(name)


@pytest.mark.long("cluster-faults")
async def test_the_removal_of_the_definition_ends_no_job_and_the_job_is_adopted_when_it_is_back(
    own_cluster: Cluster,
    cluster: TestCluster,
    resources: Resources,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    """The removal is held by the object of the running job; a user's deletion before it is still one."""
    api, port = resources.api, free_port()
    client = Client(temporal=temporal_client, namespace=resources.namespace)
    options = ("--owners", "ignore", "--health-port", str(port))
    async with Operator(
        cluster.kubeconfig,
        resources.namespace,
        address_of(temporal_client),
        tmp_path / "operator.log",
        options=options,
    ):
        spec = sleeping()
        first = await resources.apply("kept", spec)
        await resources.apply("idle", sleeping(suspend=True))
        started = await resources.until("kept", is_running("1/1"))
        await resources.until("idle", lambda known: known.status.phase == "SUSPENDED")

        await api.delete(PATH)
        kept = await resources.until("kept", lambda known: known.status.condition("Kept") is not None)
        assert kept.deleting
        assert kept.status.phase == "RUNNING"
        await resources.until_gone("idle")
        assert (await client.status("kept")).phase is JobPhase.RUNNING
        with pytest.raises(KubernetesError, match="terminating"):
            await resources.apply("new", spec)

        # As the page says for a definition that was removed by mistake.
        await api.patch(f"{collection(resources.namespace)}/kept", {"metadata": {"finalizers": None}})
        await readiness(port, "serving nothing", "not_defined", "Apply deploy/crds", status=503)
        assert (await probe(port, "/healthz"))[0] == 200
        assert (await client.status("kept")).phase is JobPhase.RUNNING

        await install_definition(api, resources.namespace)
        await readiness(port, f"serving {resources.namespace}\n", status=200)
        other = await resources.apply("kept", {**spec, "env": {"A": "1"}})
        known = await resources.until("kept", lambda known: known.status.condition("Accepted") is not None)
        assert reason(known, "Accepted") == "NameTaken"
        await resources.delete("kept")
        await resources.until_gone("kept")

        again = await resources.apply("kept", spec)
        adopted = await resources.until("kept", is_running("1/1"))
        assert reason(adopted, "Accepted") == "Adopted"
        assert adopted.status.run_id == started.status.run_id
        assert len({one.metadata.uid for one in (first, other, again)}) == 3
        assert await runs_of(temporal_client, resources.namespace, "kept") == 1
        await resources.patch("kept", {"suspend": True})
        await resources.until("kept", lambda known: known.status.phase == "SUSPENDED")
        await resources.delete("kept")
        await resources.until_gone("kept")
        assert (await client.wait("kept")).phase is JobPhase.CANCELLED


async def test_an_upgrade_of_the_definition_changes_no_object_and_no_job(
    cluster: TestCluster,
    kubectl: Path,
    resources: Resources,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    """The printed command, over the definition of an earlier release as Helm has installed it."""
    api, namespace = resources.api, resources.namespace
    older = yaml.safe_load((REPOSITORY / "deploy" / "crds" / "trainingjobs.yaml").read_text())["spec"]
    for version in older["versions"]:
        del version["subresources"]["scale"]
    (command,) = {
        one.words
        for one in COMMANDS
        if one.page == "docs/kubernetes-resource.md" and one.words[:3] == ("kubectl", "apply", "--server-side")
    }
    async with Operator(
        cluster.kubeconfig, namespace, address_of(temporal_client), tmp_path / "log", options=("--owners", "ignore")
    ):
        await resources.apply("job", sleeping())
        before = await resources.until("job", is_running("1/1"))
        await api.patch(PATH, {"spec": older})

        async def scales() -> bool:
            return await api.get(f"{collection(namespace)}/job/scale") is not None

        async def scales_not() -> bool:
            return not await scales()

        await eventually(scales_not)
        await kubectl_says(kubectl, *command[1:], kubeconfig=cluster.kubeconfig)
        await resources.patch("job", {"replicas": 1})
        await eventually(scales)
        after = await resources.until("job", is_running("1/1"))
        assert (after.metadata.uid, after.status.run_id) == (before.metadata.uid, before.status.run_id)
        await resources.delete("job")
        await resources.until_gone("job")


def reason(known: Any, kind: str) -> str:
    condition = known.status.condition(kind)
    return condition.reason if condition else ""


async def install_definition(api: KubernetesApi, namespace: str) -> None:
    async def gone() -> bool:
        return await api.get(PATH) is None

    await eventually(gone)
    await api.create(DEFINITIONS, DEFINITION)

    async def served() -> bool:
        try:
            return await api.get(collection(namespace)) is not None
        except KubernetesError:
            return False

    await eventually(served)
