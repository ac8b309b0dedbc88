"""Places the pods of node N of collocated roles on one machine.

Each requires to be where the others are; the first finds none, which the scheduler permits to a pod that matches its
own term. A pod whose machine is lost stays an object, and others would wait for that machine forever, so a new pod
leaves out those that will not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes.facts import machine_is_silent
from perdure.activities.nodes.kubernetes.gangs import GangAdapter
from perdure.activities.nodes.kubernetes.naming import LABEL, OURS, RANK, ROLE, UID, selector
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.contract import NodeRequest
from perdure.spec.role_relations import roles_collocated_with

_NAME = f"{LABEL}node"
"""A label with the pod's own name, by which others leave it out."""

_MACHINE = "kubernetes.io/hostname"


def name_label(request: NodeRequest) -> dict[str, str]:
    """Returns the label by which the pods of collocated roles know each other; none for other pods."""
    return {_NAME: request.name} if len(_roles(request)) > 1 else {}


def siblings(request: NodeRequest) -> str:
    """Returns a label selector for all pods of node N of the collocated roles; empty where the role has none."""
    roles, node = _roles(request), {**OURS, UID: request.node.uid, RANK: str(request.node.rank)}
    return f"{selector(node)},{ROLE} in ({','.join(roles)})" if len(roles) > 1 else ""


def share_machine(pod: dict[str, Any], request: NodeRequest, found: Sequence[Pod], gangs: GangAdapter) -> None:
    """Requires a pod to be on the machine of its siblings.

    Args:
        pod: the manifest.
        request: its node.
        found: the siblings that exist, and earlier incarnations of the node.
        gangs: the site's gang system.

    Raises:
        NodeRefused: if the gang system takes only pods that are alike.
    """
    role, rank = request.node.role, str(request.node.rank)
    if not gangs.may_differ(request):
        raise NodeRefused(
            f"roles.{role}.collocate: the site's gang system admits pods together only if they are alike, and each of "
            "these requires another machine; remove collocate or the queue"
        )
    over = sorted(
        one.metadata.name
        for one in found
        if one.metadata.labels[ROLE] == role or one.metadata.deletion_timestamp or machine_is_silent(one)
    )
    requirements: list[dict[str, Any]] = [
        {"key": UID, "operator": "In", "values": [request.node.uid]},
        {"key": RANK, "operator": "In", "values": [rank]},
        {"key": ROLE, "operator": "In", "values": [*_roles(request)]},
        *([{"key": _NAME, "operator": "NotIn", "values": over}] if over else []),
    ]
    term = {"topologyKey": _MACHINE, "labelSelector": {"matchExpressions": requirements}}
    affinity: dict[str, Any] = pod["spec"].get("affinity") or {}
    to_pods: dict[str, Any] = affinity.get("podAffinity") or {}
    kind = "requiredDuringSchedulingIgnoredDuringExecution"
    pod["spec"]["affinity"] = affinity | {"podAffinity": to_pods | {kind: [*to_pods.get(kind, ()), term]}}


def _roles(request: NodeRequest) -> tuple[str, ...]:
    """Returns the node's role, and those that share machines with it."""
    return (request.node.role, *roles_collocated_with(request.node.role, request.spec.roles))
