"""Tests of namespaces that are deleted with what is in them, for parts that have the chart's rights only: nothing of a
job is left, and the namespace goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.operator.operator import Operator
from perdure.operator.ownership import Ownership
from perdure.operator.resource import FINALIZER
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace, role
from tests.kubernetes.rights import chart_rights
from tests.kubernetes.site import perdure, start
from tests.kubernetes.test_operator import Resources, resources
from tests.support.waiting import eventually

__all__ = ["resources"]

NO_OWNERS = {"enabled": True, "owners": "ignore"}


@asynccontextmanager
async def operating(kubeconfig: Path, client: Client, namespace: str) -> AsyncIterator[None]:
    """An operator of one namespace."""
    api = await KubernetesApi.connect(str(kubeconfig))
    operator = asyncio.create_task(Operator(api, client, namespaces=(namespace,), ownership=Ownership.IGNORE).run())
    try:
        yield
    finally:
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        await api.close()


async def delete_namespace(job: PodJob, *, within: float = 240.0) -> None:
    """Deletes it and the rights in it, which may go before anything else does. Returns when it is gone."""
    path = f"/api/v1/namespaces/{job.namespace}"
    await job.api.delete(path)
    bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{job.namespace}/rolebindings"
    for part in ("worker", "operator"):
        await job.api.delete(f"{bindings}/perdure-jobs-{part}")
    found: list[object] = []

    async def gone() -> bool:
        namespace = await job.api.get(path)
        found[:] = [namespace and namespace["status"]]
        return namespace is None

    await eventually(gone, within=within, what=lambda: f"the namespace goes: {found}")


async def test_a_job_whose_pods_wait_is_cancelled_with_its_namespace(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, tmp_path: Path
) -> None:
    await job.allow_no_pods()
    async with (
        chart_rights(helm, own_cluster, job.api, job.namespace) as rights,
        perdure(cluster, job.namespace, kubeconfig=rights.kubeconfig("worker")) as (_, client),
    ):
        waiting = await start(client, role(), tmp_path)
        await waiting.until(lambda known: "quota" in known.next_action)
        await delete_namespace(job)
        result = await client.wait(waiting.name)
        assert result.phase is JobPhase.CANCELLED
        assert f"its namespace {job.namespace} " in result.reason


async def test_objects_of_jobs_that_run_and_that_have_ended_go_with_their_namespace(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, resources: Resources
) -> None:
    async with (
        chart_rights(helm, own_cluster, job.api, job.namespace, operator=NO_OWNERS) as rights,
        perdure(cluster, job.namespace, kubeconfig=rights.kubeconfig("worker")) as (_, client),
        operating(rights.kubeconfig("operator"), client, job.namespace),
    ):
        spec = {"limits": {"termination_grace_period": "1s"}}
        ended = role(command=["true"], rendezvous="env")
        await resources.apply("ended", {**spec, "roles": {"worker": ended}})
        await resources.apply("runs", {**spec, "roles": {"worker": role(rendezvous="env")}})
        await resources.until("ended", lambda known: known.status.finished, within=180)
        await resources.until("ended", lambda known: FINALIZER not in known.metadata.finalizers)
        await resources.until("runs", lambda known: known.status.phase == "RUNNING", within=180)
        await delete_namespace(job)
        assert (await client.wait("runs", namespace=job.namespace)).phase is JobPhase.CANCELLED


async def test_an_operator_changes_no_objects_beyond_its_namespaces(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, resources: Resources
) -> None:
    """What frees objects of its own namespaces when their roles are gone is a right of the whole cluster."""
    async with (
        job_in_a_namespace(cluster) as other,
        chart_rights(helm, own_cluster, job.api, other.namespace, operator=NO_OWNERS) as rights,
    ):
        made = await resources.apply("theirs", {"suspend": True, "roles": {"worker": role()}})
        api = await KubernetesApi.connect(str(rights.kubeconfig("operator")))
        change = {"metadata": {"finalizers": [FINALIZER]}}

        async def refusal() -> str:
            try:
                await api.patch(made.path, change, insist=False)
            except KubernetesError as error:
                return error.message
            return ""

        # A new policy holds a moment later.
        assert "its namespace is not one of this operator's" in await eventually(refusal)
        await api.close()
