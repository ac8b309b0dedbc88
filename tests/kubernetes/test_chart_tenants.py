"""Tests of one release per tenant: what belongs to a tenant is nowhere in another one's release, and two tenants cannot
share a namespace of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.base.kubernetes import KubernetesApi
from tests.kubernetes.chart import HelmFailed, Release, rendered
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace

TENANTS = ("nlp", "vision")


def values_of(tenant: str) -> dict[str, Any]:
    return {
        "site": f"perdure-{tenant}",
        "temporal": {
            "namespace": tenant,
            "secret": f"temporal-{tenant}",
            "payloadKeysSecret": f"payload-keys-{tenant}",
        },
        "jobNamespaces": [f"{tenant}-jobs"],
        "operator": {"enabled": True},
    }


def names(value: Any) -> set[str]:
    """All texts in an object, however deep."""
    match value:
        case dict():
            return {name for pair in value.items() for part in pair for name in names(part)}
        case list():
            return {name for part in value for name in names(part)}
        case _:
            return {str(value)}


async def test_nothing_of_a_tenant_is_in_the_release_of_another(helm: Path) -> None:
    releases = {tenant: await rendered(helm, **values_of(tenant)) for tenant in TENANTS}
    for tenant, other in (TENANTS, TENANTS[::-1]):
        found = " ".join(names(releases[tenant]))
        assert f"temporal-{tenant}" in found
        assert other not in found
    # A release renames nothing of another one in the cluster.
    identities = [
        {(one["kind"], one["metadata"].get("namespace", f"perdure-{tenant}"), one["metadata"]["name"]) for one in found}
        for tenant, found in releases.items()
    ]
    shared = {(kind, name) for kind, _, name in identities[0]} & {(kind, name) for kind, _, name in identities[1]}
    assert identities[0] & identities[1] == set()
    assert not [kind for kind, _ in shared if kind.startswith("Cluster") or kind.endswith("AdmissionPolicy")]


async def test_every_component_of_a_tenant_uses_its_own_namespace_credentials_and_keys(helm: Path) -> None:
    containers = {
        one["metadata"]["name"]: (one["spec"]["template"]["spec"], one["spec"]["template"]["spec"]["containers"][0])
        for one in await rendered(helm, **values_of("nlp"))
        if one["kind"] == "Deployment"
    }
    assert containers.keys() == {"perdure-worker", "perdure-gateway", "perdure-operator"}
    for pod, container in containers.values():
        environment = {one["name"]: one.get("value") for one in container["env"]}
        assert environment["TEMPORAL_NAMESPACE"] == "nlp"
        assert container["envFrom"] == [{"secretRef": {"name": "temporal-nlp"}}]
        mounted = [one["secret"]["secretName"] for one in pod["volumes"] if one["name"] == "payload-keys"]
        assert mounted == ["payload-keys-nlp"]


async def test_only_pods_of_its_own_jobs_reach_a_tenants_gateway(helm: Path) -> None:
    policies = {
        one["metadata"]["name"]: one["spec"]
        for one in await rendered(helm, **values_of("nlp"))
        if one["kind"] == "NetworkPolicy"
    }
    [source] = policies["perdure-gateway"]["ingress"][0]["from"]
    [namespaces] = source["namespaceSelector"]["matchExpressions"]
    assert (namespaces["operator"], namespaces["values"]) == ("In", ["nlp-jobs"])
    [to] = [
        rule["to"][0] for rule in policies["perdure-jobs-network"]["egress"] if rule.get("ports") == [{"port": 7433}]
    ]
    assert to["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "perdure-nlp"}


async def test_two_tenants_cannot_share_a_namespace_of_jobs(cluster: TestCluster, helm: Path, job: PodJob) -> None:
    """Only rights are installed, without pods."""
    nothing = {"replicas": 0, "gateway": {"enabled": False}}
    async with (
        job_in_a_namespace(cluster) as site,
        job_in_a_namespace(cluster) as others_site,
        job_in_a_namespace(cluster) as others_jobs,
        Release(helm, cluster.kubeconfig, site.namespace) as release,
        Release(helm, cluster.kubeconfig, others_site.namespace) as other,
    ):
        await release.apply({**nothing, "jobNamespaces": [job.namespace]})
        with pytest.raises(HelmFailed) as refused:
            await other.apply({**nothing, "jobNamespaces": [others_jobs.namespace, job.namespace]})
        said = str(refused.value)
        assert f'namespace "{job.namespace}" exists and cannot be imported' in said
        assert f'current value is "{site.namespace}"' in said

        await other.apply({**nothing, "jobNamespaces": [others_jobs.namespace]})
        for worker, own, foreign in (
            (site.namespace, job.namespace, others_jobs.namespace),
            (others_site.namespace, others_jobs.namespace, job.namespace),
        ):
            assert await may_create_pods(job.api, worker, own)
            assert not await may_create_pods(job.api, worker, foreign)


async def may_create_pods(api: KubernetesApi, site: str, namespace: str) -> bool:
    """Whether the worker of a release has this right in a namespace of jobs."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{site}:perdure-worker",
            "resourceAttributes": {"verb": "create", "resource": "pods", "namespace": namespace},
        },
    }
    answer = await api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return answer["status"]["allowed"]
