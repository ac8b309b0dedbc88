"""Tests that worker and operator have the rights that their code uses, and no others: on a real cluster that grants the
chart's rights they do all that they ever do, and each request is noted."""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.base.kubernetes import KubernetesApi, core_path
from perdure.client.client import Client
from perdure.contract import GroupRef, NodeEventKind, NodeResize, WorkdirRequest
from perdure.gateway.callers import ApiTokenReviewer, Unauthenticated
from perdure.gateway.serve import KEYRING_SECRET, _keyring
from perdure.operator.operator import Operator
from perdure.page import access
from perdure.page.users import ClusterUsers, User
from perdure.spec.data import WorkdirArchive
from perdure.spec.job import Backend
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY
from tests.kubernetes.pods import NOWHERE, PodJob, TestCluster, needing, role
from tests.kubernetes.rights import Right, chart_rights, recorded, right_for
from tests.kubernetes.test_kubernetes_resize import MI
from tests.kubernetes.test_operator import Resources, is_running, local_nodes, refused, resources, sleeping
from tests.kubernetes.test_scale_plans import Plans, plans
from tests.support.watching import watching

__all__ = ["local_nodes", "plans", "resources"]


@pytest.mark.parametrize(
    ("method", "path", "query", "expected"),
    [
        ("GET", "/api/v1/namespaces/nlp/pods", {"watch": "1"}, Right("", "pods", "watch")),
        ("GET", "/api/v1/namespaces/nlp/pods", {}, Right("", "pods", "list")),
        ("GET", "/api/v1/namespaces/nlp/pods/p", {}, Right("", "pods", "get")),
        ("PATCH", "/api/v1/namespaces/nlp/pods/p/resize", {}, Right("", "pods/resize", "patch")),
        ("GET", "/api/v1/namespaces/nlp", {}, Right("", "namespaces", "get")),
        ("GET", "/api/v1/nodes", {}, Right("", "nodes", "list")),
        ("PATCH", "/apis/perdure.dev/v1alpha1/namespaces/nlp/trainingjobs/a/status", {}, None),
    ],
)
def test_rights_are_named_as_rbac_names_them(
    method: str, path: str, query: dict[str, str], expected: Right | None
) -> None:
    assert right_for(method, path, query) == (expected or Right("perdure.dev", "trainingjobs/status", "patch"))


def preset() -> dict[str, Any]:
    """One that would widen the site's policy, for those who may use it."""
    content = yaml.safe_dump({"policy": {"host_namespaces": ["network"]}})
    metadata = {"name": "wide", "labels": {"perdure.dev/runtime": "wide"}}
    return {"metadata": metadata, "data": {"preset.yaml": content}}


async def test_a_worker_uses_each_of_its_rights_and_no_other(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chart_rights(helm, own_cluster, job.api, job.namespace, site=job.namespace) as rights:
        kubeconfig = rights.kubeconfig("worker")
        with recorded(monkeypatch, str(kubeconfig)) as used:
            settings = KubernetesSettings(
                agent_image=cluster.agent_image,
                connection=NOWHERE,
                policy=SitePolicy.parse(SITE_POLICY),
                presets_namespace=job.namespace,
            )
            worker, other = (KubernetesBackend(settings, kubeconfig=str(kubeconfig)) for _ in range(2))
            await uses_all(worker, other, job)
            await worker.close()
            await other.close()
        assert sorted(used - rights.granted("worker")) == [], "missing in the chart"
        assert sorted(rights.granted("worker") - used) == [], "needed by nothing"


async def uses_all(worker: KubernetesBackend, other: KubernetesBackend, job: PodJob) -> None:
    # Code that is uploaded, and taken by a job of servers, whose nodes have names.
    archive = WorkdirArchive(name=f"perdure-workdir-{secrets.token_hex(8)}", parts=1, digest=f"sha256:{'0' * 64}")
    upload = WorkdirRequest(
        archive=archive, backend=Backend.KUBERNETES, namespace=job.namespace, job_id=f"job/{job.namespace}/made-up"
    )
    await worker.keep_part(upload, 0, b"code")
    assert not await worker.is_adopted(upload)
    carried: dict[str, Any] = {"workdir": {"path": "/code", "archive": archive.model_dump(mode="json")}}
    server = job.changed(role(rendezvous=None, ready={"port": 6000}, pod_template=needing("missing")), **carried)
    async with watching(worker, server.watch()) as watch:
        await worker.create(server.request())
        # Another repeats that, since this one might have been killed meanwhile.
        await other.create(server.request())
        assert await worker.is_adopted(upload)
        await watch.until(NodeEventKind.PENDING, saying="FailedMount")
        assert await worker.describe(server.ref())
        await worker.delete(server.ref(grace=0.5))
    group = GroupRef(
        uid=server.uid, role="worker", group=0, backend="kubernetes", namespace=job.namespace, grace=timedelta()
    )
    await worker.clear(group)
    await worker.remove_archive(upload)
    # Memory that is raised in place.
    memory = {"requests": {"memory": "64Mi"}, "limits": {"memory": "64Mi"}}
    small = job.changed(role(pod_template={"spec": {"containers": [{"name": "training", "resources": memory}]}}))
    async with watching(worker, small.watch()):
        await worker.create(small.request())
        await worker.resize(NodeResize(**dict(small.ref()), memory=96 * MI))
        await worker.delete(small.ref(grace=0.5, winding_down=True))
    # A preset that grants its policy to accounts that may use it.
    await job.api.create(job.anchors_path, preset())
    wide = job.changed(role(pod_template={"spec": {"hostNetwork": True}}), runtime="wide")
    with pytest.raises(NodeRefused, match="whose service accounts may not use"):
        await worker.create(wide.request())
    # A namespace whose rights are gone, of which the worker learns whether it still exists.
    elsewhere = PodJob(job.api, "default")
    with pytest.raises(NodeNotYet, match="forbids it"):
        await worker.create(elsewhere.request())


async def test_an_operator_uses_each_of_its_rights_and_no_other(
    own_cluster: Cluster,
    helm: Path,
    job: PodJob,
    plans: Plans,
    resources: Resources,
    temporal_client: TemporalClient,
    local_nodes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"operator": {"enabled": True}}
    async with chart_rights(helm, own_cluster, job.api, job.namespace, **values) as rights:
        kubeconfig = str(rights.kubeconfig("operator"))
        with recorded(monkeypatch, kubeconfig) as used:
            api = await KubernetesApi.connect(kubeconfig)
            client = Client(temporal=temporal_client)
            backends = (Backend.KUBERNETES, Backend.LOCAL)
            operator = Operator(api, client, namespaces=(job.namespace,), backends=backends)
            operating = asyncio.create_task(operator.run())
            await lives(resources, plans)
            operating.cancel()
            await asyncio.gather(operating, return_exceptions=True)
            await api.close()
        assert sorted(used - rights.granted("operator")) == [], "missing in the chart"
        assert sorted(rights.granted("operator") - used) == [], "needed by nothing"


async def test_gateways_and_the_page_use_each_of_their_rights_and_no_other(
    own_cluster: Cluster, helm: Path, job: PodJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"page": {"enabled": True, "url": "https://perdure.example"}}
    uses = {"keyring": has_keyring, "gateway": reviews_pods, "page": reviews_users}
    async with chart_rights(helm, own_cluster, job.api, job.namespace, site=job.namespace, **values) as rights:
        for part, use in uses.items():
            kubeconfig = str(rights.kubeconfig(part))
            with recorded(monkeypatch, kubeconfig) as used:
                api = await KubernetesApi.connect(kubeconfig)
                await use(api, job)
                await api.close()
            assert sorted(used - rights.granted(part)) == [], f"missing in the chart for the {part}"
            assert sorted(rights.granted(part) - used) == [], f"needed by nothing of the {part}"


async def has_keyring(api: KubernetesApi, job: PodJob) -> None:
    # The first one makes it, and others read it.
    made = await _keyring(api, job.namespace, KEYRING_SECRET)
    assert (await _keyring(api, job.namespace, KEYRING_SECRET)).signing_keys == made.signing_keys


async def reviews_pods(api: KubernetesApi, job: PodJob) -> None:
    await job.api.delete(f"{core_path(job.namespace, 'secrets')}/{KEYRING_SECRET}")
    await has_keyring(api, job)
    with pytest.raises(Unauthenticated):
        await ApiTokenReviewer(api).pod_of("made-up")


async def reviews_users(api: KubernetesApi, job: PodJob) -> None:
    users = ClusterUsers(api)
    assert await users.user_of("made-up") is None
    assert not await users.may(User("nobody", "", ()), access.Right.READ, job.namespace)


async def lives(resources: Resources, plans: Plans) -> None:
    # One that uses a Secret, and is refused twice for the same reason.
    claim = {"suspend": True, "secrets": {"TOKEN": "wandb/token"}, "roles": {"worker": role()}}
    await resources.apply("refused", claim)
    await resources.until("refused", lambda known: known.status.phase == "SUSPENDED")
    for _ in range(2):
        generation = await resources.patch("refused", {"backend": "ray"})
        await resources.until("refused", refused(generation))
        await resources.patch("refused", {"backend": "kubernetes"})
        await resources.until("refused", lambda known: known.status.phase == "SUSPENDED")
    # One that is scaled, and then deleted while it runs.
    await resources.apply("job", sleeping(nodes="1:2"))
    await resources.until("job", is_running("2/2"))
    await plans.apply("smaller", replicaResourceSpecs={"worker": {"replicas": 1}})
    assert (await plans.ends("smaller"))["status"]["phase"] == "Succeeded"
    await resources.delete("job")
    await resources.until_gone("job")
    # One that goes by itself.
    await resources.apply("short", sleeping("true", ttl_after_finished="0s"))
    await resources.until_gone("short")
