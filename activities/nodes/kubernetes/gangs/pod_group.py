"""Shared parts of the adapters for schedulers that have a `PodGroup` with a minimum.

All of a job's pods are members of one group, whose minimum is the job's. So the scheduler binds the first pods together
and those beyond the minimum as capacity allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, cast

from kubernetes.utils import quantity

from activities.nodes.kubernetes.gangs.adapter import SharedObject
from activities.nodes.kubernetes.naming import run_name
from workflows.messages import NodeRequest


def group_name(request: NodeRequest) -> str:
    """Returns the group's name, which is the anchor's: at most 57 characters, so that it fits into a label."""
    return run_name(request.spec.name, request.node.uid)


def pod_group(request: NodeRequest, version: str, spec: dict[str, Any], *, mutable: bool = True) -> SharedObject:
    """Returns the job's group as an object of one API version."""
    return SharedObject(
        collection=f"/apis/{version}/namespaces/{request.spec.namespace}/podgroups",
        content={"apiVersion": version, "kind": "PodGroup", "metadata": {"name": group_name(request)}, "spec": spec},
        mutable=mutable,
    )


def minimum_resources(request: NodeRequest, pod: Mapping[str, Any]) -> dict[str, str]:
    """Returns the resources that the job's minimum of nodes needs together."""
    return {name: f"{amount * request.minimum:f}" for name, amount in sorted(_requests(pod["spec"]).items())}


def _requests(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Returns the resources that schedulers count for a pod: those of its containers and sidecars together, or more if
    an init container that runs before them needs more."""
    running: dict[str, Decimal] = {}
    most: dict[str, Decimal] = {}
    for container in pod.get("initContainers", ()):
        requests = _sum(running, dict(_quantities(container)))
        if container.get("restartPolicy") == "Always":
            running = requests
        most = _most(most, requests)
    for container in pod["containers"]:
        running = _sum(running, dict(_quantities(container)))
    return _most(most, running)


def _quantities(container: Mapping[str, Any]) -> Iterator[tuple[str, Decimal]]:
    resources = container.get("resources", {})
    # A resource with a limit only is requested with the same amount.
    for name, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
        yield name, cast("Any", quantity).parse_quantity(amount)


def _sum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in {**one, **other}}


def _most(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in {**one, **other}}
