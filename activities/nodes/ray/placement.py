"""The bundles of a job's nodes: one placement group for each role, or for roles that share machines."""

from __future__ import annotations

from typing import Any, Final

from perdure.contract import NodeRequest
from perdure.spec.quantities import amount
from perdure.spec.role_relations import roles_collocated_with
from perdure.spec.roles import Role

PREFIX: Final = "perdure/"
"""The beginning of the names of all placement groups: `perdure/<uid>/<namespace>/<job>/<roles>`."""

_LEAST: Final = {"CPU": 1.0}
"""The bundle of a role that names no resources; Ray takes no empty one."""
_OF_TYPE: Final = 0.001
"""The amount of `accelerator_type:…` that Ray's documentation requests."""


def prefix_of(uid: str) -> str:
    """Returns the beginning of the names of the placement groups of one run of a job."""
    return f"{PREFIX}{uid}/"


def bundle_of(role: Role) -> dict[str, float]:
    """Returns what one node of a role requires, in Ray's names."""
    needs = role.resources
    bundle: dict[str, float] = {}
    if needs.cpu is not None:
        bundle["CPU"] = float(amount(needs.cpu))
    if needs.memory is not None:
        bundle["memory"] = float(int(amount(needs.memory)))
    if needs.gpu:
        bundle["GPU"] = float(needs.gpu)
    if needs.gpu_type is not None:
        bundle[f"accelerator_type:{needs.gpu_type}"] = _OF_TYPE
    return bundle | role.ray.resources or dict(_LEAST)


def group_of(request: NodeRequest) -> dict[str, Any]:
    """Returns the placement group of a node's role, for the bridge.

    The bundles of the first nodes, as many as the role needs, are reserved together, each on another machine. Those of
    further nodes follow one by one.
    """
    spec, node = request.spec, request.node
    names = sorted((node.role, *roles_collocated_with(node.role, spec.roles)))
    roles = [spec.roles[name] for name in names]
    bundle: dict[str, float] = {}
    labels: dict[str, str] = {}
    for role in roles:
        labels |= role.ray.labels
        for name, number in bundle_of(role).items():
            bundle[name] = bundle.get(name, 0.0) + number
    return {
        "prefix": prefix_of(node.uid),
        "name": f"{prefix_of(node.uid)}{spec.namespace}/{spec.name}/{'+'.join(names)}",
        "bundle": bundle,
        "labels": labels,
        "gang": max(request.minimum if name == node.role else spec.roles[name].nodes.min for name in names),
    }


def actor_options(role: Role) -> dict[str, Any]:
    """Returns the options of the actor, which takes the node's part of its bundle."""
    bundle = bundle_of(role)
    return {
        "num_cpus": bundle.pop("CPU", 0.0),
        "num_gpus": bundle.pop("GPU", 0.0),
        "memory": bundle.pop("memory", None),
        "resources": bundle,
    }
