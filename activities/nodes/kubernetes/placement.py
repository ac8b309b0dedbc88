"""Where a node's pod may run: near the job's other nodes, away from machines that have failed, and on a machine that
does not answer for as long as the job keeps it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.naming import LEAVING, ROLE, UID
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.contract import NodeRequest
from perdure.spec.roles import Role

_SILENT_MACHINE: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of a machine whose kubelet does not answer. Pods that do not tolerate them are deleted; by default Kubernetes
gives each pod a toleration of 300 s."""
_STAYS: Final = tuple({"key": taint, "operator": "Exists", "effect": "NoExecute"} for taint in _SILENT_MACHINE)


def to_other_nodes(request: NodeRequest, role: Role) -> dict[str, Any]:
    """Returns affinity to the role's other nodes. The first pod finds no other, which the scheduler permits to a pod
    that matches its own term."""
    level = role.topology and (role.topology.required or role.topology.preferred)
    others = {
        "matchLabels": {UID: request.node.uid, ROLE: request.node.role},
        "matchExpressions": [{"key": LEAVING, "operator": "DoesNotExist"}],
    }
    term = {"topologyKey": level, "labelSelector": others}
    if role.topology and role.topology.required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def avoiding(affinity: dict[str, Any], machines: Sequence[str]) -> dict[str, Any]:
    """Adds a preference for all machines but these to an affinity; the pod does not wait for them."""
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [machine]} for machine in machines]
    kind = "preferredDuringSchedulingIgnoredDuringExecution"
    to_machines: dict[str, Any] = affinity.get("nodeAffinity") or {}
    preferred: list[Any] = [*to_machines.get(kind, ()), {"weight": 100, "preference": {"matchFields": others}}]
    return affinity | {"nodeAffinity": to_machines | {kind: preferred}}


def keep_from_own_pods_only(spec: dict[str, Any], request: NodeRequest) -> None:
    """Narrows the anti-affinity that a template requires to pods of the same job.

    The scheduler holds a required term both ways: one whose selector fits all pods would keep every other pod of the
    namespace from being scheduled. A preferred one keeps none away.
    """
    affinity: Mapping[str, Any] = spec.get("affinity") or {}
    to_pods: Mapping[str, Any] = affinity.get("podAntiAffinity") or {}
    kind = "requiredDuringSchedulingIgnoredDuringExecution"
    if terms := to_pods.get(kind):
        own = [merge(term, {"labelSelector": {"matchLabels": {UID: request.node.uid}}}) for term in terms]
        spec["affinity"] = {**affinity, "podAntiAffinity": {**to_pods, kind: own}}


def stay_on_silent_machine(spec: dict[str, Any]) -> None:
    """Keeps Kubernetes from deleting the pod because its machine's kubelet does not answer.

    The ranks may be training there, and would be killed when the kubelet is back. The job replaces the node as soon as
    anything shows that it has failed. A toleration of the template's own for these taints, with its time, stays.
    """
    tolerated: Sequence[Mapping[str, Any]] = spec.get("tolerations") or ()
    added = [dict(own) for own in _STAYS if not any(_is_about(other, own["key"]) for other in tolerated)]
    spec["tolerations"] = [*tolerated, *added]


def stay_alike(spec: dict[str, Any], others: Sequence[Pod]) -> None:
    """Takes that back where its group, which takes only pods that are alike, has some of an earlier release."""
    limited = {known.key for pod in others for known in pod.spec.tolerations if known.toleration_seconds}
    spec["tolerations"] = [own for own in spec["tolerations"] if own not in _STAYS or own["key"] not in limited]


def _is_about(toleration: Mapping[str, Any], taint: str) -> bool:
    return toleration.get("key") in (None, "", taint) and toleration.get("effect") in (None, "", "NoExecute")
