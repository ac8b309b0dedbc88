"""What the schedulers that know a `PodGroup` with a minimum have in common.

All of a job's pods are members of one group, whose minimum is the job's. So the first ones are bound together, and
those beyond the minimum as there is room.
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
    """The anchor's name: at most 57 characters, so that it fits into a label."""
    return run_name(request.spec.name, request.node.uid)


def pod_group(request: NodeRequest, version: str, spec: dict[str, Any], *, mutable: bool = True) -> SharedObject:
    """The job's group, in one API's words."""
    return SharedObject(
        collection=f"/apis/{version}/namespaces/{request.spec.namespace}/podgroups",
        content={"apiVersion": version, "kind": "PodGroup", "metadata": {"name": group_name(request)}, "spec": spec},
        mutable=mutable,
    )


def minimum_resources(request: NodeRequest, pod: Mapping[str, Any]) -> dict[str, str]:
    """What the fewest nodes of the job need together."""
    return {name: f"{amount * request.minimum:f}" for name, amount in sorted(_requests(pod["spec"]).items())}


def _requests(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """What schedulers count for a pod: its containers and sidecars, or more where a container before them needs it."""
    running: dict[str, Decimal] = {}
    most: dict[str, Decimal] = {}
    for container in pod.get("initContainers", ()):
        asked = _sum(running, dict(_quantities(container)))
        if container.get("restartPolicy") == "Always":
            running = asked
        most = _most(most, asked)
    for container in pod["containers"]:
        running = _sum(running, dict(_quantities(container)))
    return _most(most, running)


def _quantities(container: Mapping[str, Any]) -> Iterator[tuple[str, Decimal]]:
    resources = container.get("resources", {})
    # What has nothing but a limit requests as much.
    for name, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
        yield name, cast("Any", quantity).parse_quantity(amount)


def _sum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in {**one, **other}}


def _most(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in {**one, **other}}
