"""Kueue: plain pods, grouped by what is admitted and preempted together.

Kueue's webhook gates each pod that has a queue and holds it with a finalizer. A group gets quota for all its pods or
for none. The *base part* is the job's first `min` nodes; every `unit` beyond it is a part of its own. So Kueue first
preempts parts without which the job continues with fewer nodes.

Kueue creates no pods and waits indefinitely for lost pods of a group. So the backend does two things for it: it creates
a replacement only when Kueue counts it as one, and it releases what Kueue holds of a node that will not be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.activities.nodes.kubernetes.gangs.adapter import OneByOne, queue_label
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.base.words import count
from perdure.contract import NodeRequest
from perdure.contract.names import dns_label
from perdure.spec.roles import NodeCount

GATE = "kueue.x-k8s.io/admission"
FINALIZER = "kueue.x-k8s.io/managed"
GROUP_NAME = "kueue.x-k8s.io/pod-group-name"
TOTAL_COUNT = "kueue.x-k8s.io/pod-group-total-count"
FAST_ADMISSION = "kueue.x-k8s.io/pod-group-fast-admission"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"


class Kueue(OneByOne):
    """Groups and labels the pods of jobs that name a `queue`; leaves other jobs alone."""

    finalizer = FINALIZER
    counts_requests = True

    def __init__(self, *, elastic_priority_class: str = "") -> None:
        """Creates the adapter.

        Args:
            elastic_priority_class: the WorkloadPriorityClass of the parts of a job beyond `nodes.min`.
        """
        self._elastic_priority_class = elastic_priority_class

    def template(self, request: NodeRequest) -> dict[str, Any]:
        spec = request.spec
        if not spec.queue:
            return {}
        labels, annotations = queue_label(spec), dict[str, str]()
        part = _part(request)
        if len(part) > 1:
            labels[GROUP_NAME] = dns_label(spec.name, f"-{request.node.role}-{part.start}-{request.node.uid}")
            # Kueue requests the quota when the first pod exists: the group's size is known, and its pods are alike.
            annotations |= {TOTAL_COUNT: str(len(part)), FAST_ADMISSION: "true"}
        if part.start and self._elastic_priority_class:
            labels[PRIORITY_CLASS] = self._elastic_priority_class
        template: dict[str, Any] = {"metadata": {"labels": labels, "annotations": annotations}}
        if topology := spec.roles[request.node.role].topology:
            level = topology.required or topology.preferred or ""
            annotations[REQUIRED_TOPOLOGY if topology.required else PREFERRED_TOPOLOGY] = level
            template["spec"] = {"affinity": None}
        return template

    def needs(self, request: NodeRequest) -> frozenset[int]:
        if not request.spec.queue:
            return frozenset()
        part = _part(request)
        first = {0} if part.start else set[int]()
        return frozenset(first | ({part.start, request.node.rank} if len(part) > 1 else set()))

    def may_differ(self, request: NodeRequest) -> bool:
        """Returns whether the pod is alone in its group: Kueue matches the pods of a group by their requirements, and
        does not accept a different pod as a member."""
        return not request.spec.queue or len(_part(request)) == 1

    def obstacle(self, request: NodeRequest, pods: Sequence[Pod]) -> str:
        """Makes parts beyond the base wait for the base: two jobs that each hold a part without their base would wait
        forever.

        In a group a replacement waits for the end of the pod that it replaces: Kueue would delete it as an excess pod.
        """
        rank = request.node.rank
        for pod in pods:
            if pod.rank == rank and pod.incarnation < request.node.incarnation and _counts(pod):
                return f"node {rank}.{pod.incarnation}, which it replaces, still counts in its group of Kueue"
        if _part(request).start and not any(pod.rank == 0 and _is_admitted(pod) for pod in pods):
            return (
                f"queue {request.spec.queue} has not admitted the job's first {count(_nodes(request).min, 'node')} yet"
            )
        return ""


def _nodes(request: NodeRequest) -> NodeCount:
    """Returns the node count as submitted: a job's groups do not change when it is scaled."""
    return request.spec.roles[request.node.role].nodes


def _part(request: NodeRequest) -> range:
    """Returns the nodes (ranks) that are admitted and preempted together with this one."""
    nodes, rank = _nodes(request), request.node.rank
    if rank < nodes.min:
        return range(nodes.min)
    first = rank - (rank - nodes.min) % nodes.unit
    return range(first, first + nodes.unit)


def _counts(pod: Pod) -> bool:
    """Returns whether the pod occupies its place in its group: it runs, may run, or has succeeded."""
    return pod.status.phase != "Failed" and not pod.never_runs


def _is_admitted(pod: Pod) -> bool:
    return _counts(pod) and all(gate.name != GATE for gate in pod.spec.scheduling_gates)
