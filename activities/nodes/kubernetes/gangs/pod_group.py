"""Shared parts of the adapters for schedulers that have a `PodGroup` with a minimum.

All pods of a role are members of one group, whose minimum is the role's. So the scheduler binds the first pods together
and those beyond the minimum as capacity allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.activities.nodes.kubernetes.gangs.adapter import SharedObject
from perdure.activities.nodes.kubernetes.resources import requests_of
from perdure.contract import NodeRequest
from perdure.contract.names import dns_label, run_name


def group_name(request: NodeRequest) -> str:
    """Returns the group's name, which is the anchor's, and has the role's in a job of several. It fits into a label."""
    job, node = request.spec, request.node
    if len(job.roles) == 1:
        return run_name(job.name, node.uid)
    return dns_label(f"perdure-{job.name}", f"-{node.role}-{node.uid}")


def pod_group(request: NodeRequest, version: str, spec: dict[str, Any], *, mutable: bool = True) -> SharedObject:
    """Returns the role's group as an object of one API version."""
    return SharedObject(
        collection=f"/apis/{version}/namespaces/{request.spec.namespace}/podgroups",
        content={"apiVersion": version, "kind": "PodGroup", "metadata": {"name": group_name(request)}, "spec": spec},
        mutable=mutable,
    )


def minimum_resources(request: NodeRequest, pod: Mapping[str, Any]) -> dict[str, str]:
    """Returns the resources that the role's minimum of nodes needs together."""
    return {name: f"{amount * request.minimum:f}" for name, amount in sorted(requests_of(pod["spec"]).items())}
