"""Tests of the site policy against a real API server: the fields that it knows, and what `restricted` forbids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perdure.activities.nodes.kubernetes import KubernetesSettings
from perdure.activities.nodes.kubernetes.pod import pod_of
from perdure.activities.nodes.kubernetes.pod_fields import POD_TEMPLATE, Fields
from tests.kubernetes.pods import PodJob

Schemas = dict[str, Any]


def properties(schema: Schemas, schemas: Schemas) -> Schemas:
    """The fields of a type, or of the items of a list."""
    for part in (schema, schema.get("items", {}), *schema.get("allOf", ()), *schema.get("items", {}).get("allOf", ())):
        if "properties" in part:
            return part["properties"]
        if reference := part.get("$ref"):
            return properties(schemas[reference.rpartition("/")[2]], schemas)
    return {}


def undecided(schema: Schemas, fields: Fields, schemas: Schemas, path: str) -> Iterator[str]:
    for name, inner in properties(schema, schemas).items():
        if (decision := fields.get(name)) is None:
            yield f"{path}.{name}"
        elif decision.below:
            yield from undecided(inner, decision.below, schemas, f"{path}.{name}")


async def test_every_field_that_the_server_knows_has_a_decision(job: PodJob) -> None:
    served = await job.api.get("/openapi/v3/api/v1")
    assert served
    schemas: Schemas = served["components"]["schemas"]
    pod = schemas["io.k8s.api.core.v1.PodTemplateSpec"]
    assert len(properties(pod["properties"]["spec"], schemas)) > 30, "else nothing is compared"
    assert list(undecided(pod, POD_TEMPLATE, schemas, "pod")) == []


@pytest.fixture
async def restricted(job: PodJob) -> PodJob:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await job.api.patch(f"/api/v1/namespaces/{job.namespace}", {"metadata": {"labels": labels}})
    return job


GENEROUS: dict[str, Any] = {
    "metadata": {
        "labels": {"team": "vision"},
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    },
    "spec": {
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {}}}
                ]
            }
        },
        "containers": [
            {
                "name": "training",
                "image": "localhost/none",
                "livenessProbe": {"httpGet": {"port": 80, "httpHeaders": [{"name": "a", "value": "b"}]}},
                "lifecycle": {"preStop": {"exec": {"command": ["id"]}}},
                "securityContext": {
                    "seccompProfile": {"type": "Localhost", "localhostProfile": "a.json"},
                    "seLinuxOptions": {"type": "container_t", "level": "s0:c1,c2"},
                    "appArmorProfile": {"type": "RuntimeDefault"},
                },
                "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
                "volumeMounts": [{"name": "all", "mountPath": "/all", "subPath": "a"}],
            },
            {"name": "beside", "image": "localhost/none", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
        ],
        "initContainers": [{"name": "before", "image": "localhost/none", "restartPolicy": "Always"}],
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
        "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["a"]}],
        "securityContext": {"fsGroup": 2000, "supplementalGroups": [3000], "runAsUser": 2000},
        "volumes": [
            {
                "name": "all",
                "projected": {
                    "sources": [
                        {"configMap": {"name": "a", "items": [{"key": "a", "path": "a"}]}},
                        {"secret": {"name": "a"}},
                        {"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
                    ]
                },
            },
            {"name": "scratch", "emptyDir": {}},
            {
                "name": "fast",
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
                    }
                },
            },
        ],
    },
}
"""A template with whatever the default policy allows."""


async def test_whatever_the_default_policy_allows_is_restricted(restricted: PodJob) -> None:
    settings = KubernetesSettings(agent_image="localhost/none")
    for template in ({}, GENEROUS):
        given = {"nodes": 1, "command": ["id"], "image": "localhost/none", "pod_template": template}
        pod = pod_of(restricted.changed(given).request(), settings)
        await restricted.api.create(restricted.pods_path, pod, dry_run=True, strict=True)
