"""Tests of users of a real cluster who may create TrainingJobs and nothing else, and who try to get more by them."""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client as TemporalClient

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.operator.resource import TrainingJobResource, collection
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure
from tests.kubernetes.test_operator import (
    POLICIES,
    Operator,
    Resources,
    address_of,
    is_running,
    refused,
    resources,
    sleeping,
)
from tests.support.waiting import eventually

__all__ = ["resources"]

RBAC = "/apis/rbac.authorization.k8s.io/v1"
TEAM = "attackers"
JOBS = {"apiGroups": ["perdure.dev"], "resources": ["trainingjobs"], "verbs": ["*"]}


async def grant(job: PodJob, user: str, *rules: dict[str, Any]) -> None:
    """Lets a user do this in the namespace of the test."""
    name = f"r-{secrets.token_hex(4)}"
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": name}, "rules": list(rules)}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
    await job.api.create(f"{RBAC}/namespaces/{job.namespace}/roles", role)
    await job.api.create(f"{RBAC}/namespaces/{job.namespace}/rolebindings", binding)


@asynccontextmanager
async def acting_as(cluster: Cluster, job: PodJob, user: str, *rules: dict[str, Any]) -> AsyncIterator[Resources]:
    """The objects of the namespace, as a user sees and changes them who may change TrainingJobs, and do this."""
    await grant(job, user, JOBS, *rules)
    api = await KubernetesApi.connect(str(cluster.kubeconfig_of(user, TEAM)))
    yield Resources(api, job.namespace)
    await api.close()


async def secret(job: PodJob, name: str) -> None:
    content = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
    data = {"token": base64.b64encode(b"of another team").decode()}
    await job.api.create(f"/api/v1/namespaces/{job.namespace}/secrets", content | {"data": data})


async def events_of(job: PodJob, resource: TrainingJobResource, last: str) -> dict[str, tuple[str, int]]:
    """The message and count of each Event about an object, by its reason, once there is the last one: the operator
    writes it after the status."""

    async def written() -> dict[str, tuple[str, int]] | None:
        found = await job.api.list(f"/api/v1/namespaces/{job.namespace}/events")
        about = [one for one in found if one["involvedObject"].get("uid") == resource.metadata.uid]
        by_reason = {one["reason"]: (one["message"], one["count"]) for one in about}
        return by_reason if last in by_reason else None

    return await eventually(written)


STEALING = {
    "name a Secret": ({"secrets": {"TOKEN": "victim/token"}}, {}, "secrets.TOKEN", "Secret", "get secrets/victim"),
    "mount a Secret": (
        {},
        {"volumes": [{"name": "v", "secret": {"secretName": "victim"}}]},
        "roles.worker.pod_template.spec.volumes.v.secret",
        "Secret",
        "get secrets/victim",
    ),
    "run as a service account": (
        {},
        {"serviceAccountName": "victim"},
        "roles.worker.pod_template.spec.serviceAccountName",
        "ServiceAccount",
        "impersonate serviceaccounts/victim",
    ),
    "mount a claim": (
        {"volumes": [{"mount_path": "/data", "pvc": "victim"}]},
        {},
        "volumes.0.pvc",
        "PersistentVolumeClaim",
        "use persistentvolumeclaims/victim",
    ),
}


@pytest.mark.parametrize("way", STEALING)
async def test_a_job_uses_nothing_that_its_owner_may_not(
    way: str,
    own_cluster: Cluster,
    job: PodJob,
    resources: Resources,
    temporal_client: TemporalClient,
    tmp_path: Path,
) -> None:
    fields, template, field, kind, right = STEALING[way]
    await secret(job, "victim")
    worker = {"nodes": 1, "image": "x", "command": ["true"], "pod_template": {"spec": template}}
    spec = {"backend": "kubernetes", "roles": {"worker": worker}, **fields}
    async with (
        acting_as(own_cluster, job, "mallory") as mallory,
        Operator(own_cluster.kubeconfig, job.namespace, address_of(temporal_client), tmp_path / "operator.log"),
    ):
        await mallory.apply("theft", spec)
        known = await resources.until("theft", refused(1))
        condition = known.status.condition("Accepted")
        assert condition is not None
        assert condition.reason == "Forbidden"
        assert condition.message == (
            f'{field}: got "victim"; the object\'s owner "mallory" may not use the {kind}, which takes the right to '
            f"{right}, or to create pods, in the namespace {job.namespace}"
        )
        assert known.status.phase == "REFUSED"
        assert await events_of(job, known, "Refused") == {"Refused": (f"Forbidden: {condition.message}", 1)}
        assert known.status.run_id == ""
        client = Client(temporal=temporal_client, namespace=job.namespace)
        assert await client.list() == []


async def test_owners_with_the_right_run_their_jobs_and_own_them(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, resources: Resources, tmp_path: Path
) -> None:
    await secret(job, "mine")
    mine = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["mine"], "verbs": ["get"]}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    training = {"name": "training", "volumeMounts": [{"name": "secret", "mountPath": "/secret"}]}
    volume = {"name": "secret", "secret": {"secretName": "mine"}}
    template = {"spec": {"containers": [training], "volumes": [volume]}}
    command = ["sh", "-c", "cat /secret/token; echo; exec sleep 600"]
    worker = role(pod_template=template, rendezvous="env", command=command)
    spec = {"roles": {"worker": worker}, "limits": {"termination_grace_period": "1s"}}
    async with (
        perdure(cluster, job.namespace) as (server, client),
        acting_as(own_cluster, job, "alice", mine) as alice,
        acting_as(own_cluster, job, "bob", pods) as bob,
        Operator(own_cluster.kubeconfig, job.namespace, server.address, tmp_path / "operator.log"),
    ):
        for user, name in ((alice, "of-alice"), (bob, "of-bob")):
            await user.apply(name, spec)
            known = await resources.until(name, is_running("1/1"))
            said = [line.text async for line in client.logs(name)]
            assert said == ["of another team"]
            events = await events_of(job, known, "Running")
            assert {reason: count for reason, (_, count) in events.items()} == {"Submitted": 1, "Running": 1}
        assert {one.name: one.owner for one in await client.list()} == {"of-alice": "alice", "of-bob": "bob"}
        for user, name in ((alice, "of-alice"), (bob, "of-bob")):
            await user.delete(name)
            await resources.until_gone(name)


async def test_nobody_writes_the_owner_but_the_cluster(own_cluster: Cluster, job: PodJob, resources: Resources) -> None:
    forged = {"username": "alice", "groups": ["system:masters"]}
    identity = {"username": "mallory", "uid": "", "groups": (TEAM, "system:authenticated")}
    path = f"{collection(job.namespace)}/job"
    async with acting_as(own_cluster, job, "alice") as alice, acting_as(own_cluster, job, "mallory") as mallory:
        content = {"apiVersion": "perdure.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "forged"}}
        made = await mallory.api.create(collection(job.namespace), {**content, "spec": sleeping(), "owner": forged})
        assert owner_of(made) == identity

        made = await alice.apply("job", sleeping(suspend=True))
        assert made.owner is not None
        assert made.owner.username == "alice"
        # Queues suspend and resume jobs of others: that makes them no owners.
        await mallory.patch("job", {"suspend": False})
        assert owner_of(await mallory.api.get(path))["username"] == "alice"
        for stolen in (forged, None, {"username": "root", "groups": []}):
            answer = await mallory.api.patch(path, {"owner": stolen})
            assert owner_of(answer)["username"] == "alice"
        status = await mallory.api.patch(path, {"metadata": {"labels": {"a": "b"}}, "status": {"phase": "RUNNING"}})
        assert owner_of(status)["username"] == "alice"
        # The user who changes what runs answers for it.
        changed = await mallory.api.patch(path, {"spec": {"env": {"A": "1"}}, "owner": forged})
        assert owner_of(changed) == identity


async def test_a_record_that_anybody_may_write_is_not_believed(
    own_cluster: Cluster,
    job: PodJob,
    resources: Resources,
    temporal_client: TemporalClient,
    tmp_path: Path,
) -> None:
    await protect_all_but(job, job.namespace)
    path = collection(job.namespace)
    content = {"apiVersion": "perdure.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "forged"}}
    forged = {"username": "admin", "uid": "", "groups": ["system:masters"]}

    try:
        async with acting_as(own_cluster, job, "mallory") as mallory:

            async def unprotected() -> bool:
                with contextlib.suppress(KubernetesError):
                    made = await mallory.api.create(
                        path, {**content, "spec": sleeping(), "owner": forged}, dry_run=True
                    )
                    return made.get("owner") == forged
                return False

            await eventually(unprotected)
            await mallory.api.create(path, {**content, "spec": sleeping(), "owner": forged})
            await mallory.apply("nobody-s", sleeping())
            log = tmp_path / "operator.log"
            async with Operator(own_cluster.kubeconfig, job.namespace, address_of(temporal_client), log):
                for name, why in (("forged", "it proves nothing"), ("nobody-s", "none is recorded")):
                    known = await resources.until(name, refused(1))
                    condition = known.status.condition("Accepted")
                    assert condition is not None
                    assert why in condition.message
    finally:
        await protect_all_but(job)


async def protect_all_but(job: PodJob, *namespaces: str) -> None:
    """Lets users write owners in these namespaces."""
    others = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": list(namespaces)}
    matching = {"namespaceSelector": {"matchExpressions": [others]}} if namespaces else None
    for kind in ("mutating", "validating"):
        path = f"{POLICIES}/{kind}admissionpolicybindings/perdure-perdure-operator-owners"
        await job.api.patch(path, {"spec": {"matchResources": matching}})


def owner_of(thing: dict[str, Any] | None) -> dict[str, Any]:
    assert thing is not None
    found = TrainingJobResource.model_validate({**thing, "status": {}}).owner
    assert found is not None
    return found.model_dump()
