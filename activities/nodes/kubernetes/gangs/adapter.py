"""The interface between a job's pods and the system that admits them in groups: one adapter per system, chosen by the
site.

A job trains with at least `nodes.min` nodes, so its first pods are useful only together; pods beyond them can be added
and removed by the unit. An adapter expresses that in its system's terms. It makes no decision about the job: a node
that is not admitted waits, and a preempted node is lost like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.contract import NodeRequest
from perdure.spec.job import JobSpec


class SharedObject(NamedTuple):
    """One object for all pods of a job's run; it belongs to the job's anchor and is deleted with it."""

    collection: str
    """The path at which it is created."""
    content: dict[str, Any]
    mutable: bool
    """Whether its `spec` may be changed when the job is scaled."""


class GangAdapter(Protocol):
    """The requirements of one admission system for a job's pods. All members are pure."""

    finalizer: str
    """The finalizer with which the system holds ended pods; empty if it holds none."""
    counts_requests: bool
    """Whether the system counts a pod's requests when it admits it, and not what they become."""

    def template(self, request: NodeRequest) -> dict[str, Any]:
        """Returns a PodTemplateSpec to merge over Perdure's defaults and under the user's `pod_template`. None removes
        a field."""
        ...

    def shared_objects(self, request: NodeRequest, pod: dict[str, Any]) -> Sequence[SharedObject]:
        """Returns the objects that must exist before the job's first pod.

        Args:
            request: any node of the job.
            pod: that node's manifest.
        """
        ...

    def needs(self, request: NodeRequest) -> frozenset[int]:
        """Returns the nodes (ranks) whose pods decide whether this one can be created; empty if it always can."""
        ...

    def may_differ(self, request: NodeRequest) -> bool:
        """Returns whether the pod may prefer other machines than its siblings do."""
        ...

    def obstacle(self, request: NodeRequest, pods: Sequence[Pod]) -> str:
        """Returns why the pod must not be created yet; empty if it may be.

        Args:
            request: the node.
            pods: the pods of the nodes that it `needs`, of all incarnations.
        """
        ...


QUEUE = "kueue.x-k8s.io/queue-name"


def queue_label(spec: JobSpec) -> dict[str, str]:
    """Returns the label that names the job's queue: Kueue's, which other tools read as well."""
    return {QUEUE: spec.queue} if spec.queue else {}


class OneByOne:
    """No gang: every pod is admitted by itself."""

    finalizer = ""
    counts_requests = False

    def template(self, request: NodeRequest) -> dict[str, Any]:
        return {"metadata": {"labels": queue_label(request.spec)}}

    def shared_objects(self, request: NodeRequest, pod: dict[str, Any]) -> Sequence[SharedObject]:
        return ()

    def needs(self, request: NodeRequest) -> frozenset[int]:
        return frozenset()

    def may_differ(self, request: NodeRequest) -> bool:
        return True

    def obstacle(self, request: NodeRequest, pods: Sequence[Pod]) -> str:
        return ""
