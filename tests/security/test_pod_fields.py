"""Tests that the site policy decides about every field that a pod can have in the Kubernetes API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client import models

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes.pod_fields import POD_TEMPLATE, Decision, Fields
from perdure.activities.nodes.kubernetes.site_policy import ORDINARY_FIELDS
from tests.security.test_site_policy import is_refused, made, training


def types_of(model: str) -> dict[str, str]:
    """The fields of one of the client's types, with the type of each; empty for a type that has none."""
    known = getattr(models, model, None)
    if known is None:
        return {}
    return {known.attribute_map[name]: kind for name, kind in known.openapi_types.items()}


def compared(model: str, fields: Fields, path: str) -> Iterator[str]:
    """The differences between a type of the API and the table."""
    types = types_of(model)
    yield from (f"{path}.{name} has no decision" for name in types.keys() - fields.keys())
    yield from (f"{path}.{name} is no field of the API" for name in fields.keys() - types.keys())
    for name in types.keys() & fields.keys():
        if below := fields[name].below:
            yield from compared(re.findall(r"\w+", types[name])[-1], below, f"{path}.{name}")


def test_every_field_of_the_api_has_a_decision() -> None:
    assert sorted(compared("V1PodTemplateSpec", POD_TEMPLATE, "pod")) == []


WHOLE = {
    # Of these the policy's volumes and projected_sources decide about all that is below.
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "csi", "fc", "flexVolume", "flocker"),
    *("gcePersistentDisk", "gitRepo", "glusterfs", "iscsi", "nfs", "photonPersistentDisk", "portworxVolume"),
    *("quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume", "clusterTrustBundle", "podCertificate"),
}


def left_whole(model: str, fields: Fields) -> Iterator[str]:
    """The fields that have others below them, about which the table does not decide one by one."""
    for name, kind in types_of(model).items():
        inner, decision = re.findall(r"\w+", kind)[-1], fields[name]
        if decision.below:
            yield from left_whole(inner, decision.below)
        elif types_of(inner) and not decision.named:
            yield name


def test_only_kinds_of_volumes_are_decided_about_as_a_whole() -> None:
    assert set(left_whole("V1PodTemplateSpec", POD_TEMPLATE)) == WHOLE


def named(fields: Fields, path: str = "") -> Iterator[tuple[str, Decision]]:
    for name, decision in fields.items():
        yield f"{path}{name}", decision
        yield from named(decision.below, f"{path}{name}.")


def test_by_default_jobs_may_set_all_fields_that_need_no_name() -> None:
    top = {path: one for path, one in named(POD_TEMPLATE) if path.count(".") == 1}
    assert {path for path, one in top.items() if not one.named} == set(ORDINARY_FIELDS)


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"hostGpus": True}},
        {"spec": {"HostPID": True}},
        training(devices=[{"path": "/dev/mem"}]),
        training(securityContext={"privilegedDevices": True}),
        training(lifecycle={"preStart": {"exec": {"command": ["id"]}}}),
        {"spec": {"affinity": {"machineAffinity": {}}}},
        {"spec": {"volumes": [{"name": "v", "emptyDir": {"onHost": "/"}}]}},
        {"metadata": {"powers": ["all"]}},
        {"status": {}},
    ],
)
def test_a_field_that_no_release_has_yet_is_refused_whatever_the_policy_says(template: dict[str, Any]) -> None:
    is_refused(
        "no field that this release of Perdure does not know",
        template=template,
        policy={"template_fields": ["metadata", "spec", "status", "spec.hostGpus"], "privileged": True},
    )


def test_what_is_no_pod_template_is_refused() -> None:
    for template in ({"spec": {"securityContext": "none"}}, training(livenessProbe={"exec": ["id"]})):
        with pytest.raises(NodeRefused, match="not a PodTemplateSpec"):
            made(template)
