"""The seam between a job's pods and whatever admits them in groups: one adapter per system, chosen by the site.

A job trains with `nodes.min` nodes or not at all, so its first pods are worth something only together; what it has
beyond them may come and go by the unit. An adapter says that in its system's words. It decides nothing about the job:
a node that is not admitted waits, and one that is preempted is lost, like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from activities.nodes.kubernetes.objects import Pod
from perdure.spec.job import JobSpec
from workflows.messages import NodeRequest


class SharedObject(NamedTuple):
    """One object for all pods of a job's run; it belongs to the job's anchor, and goes with it."""

    collection: str
    """The path that it is created at."""
    content: dict[str, Any]
    mutable: bool
    """Whether its `spec` may be changed later, when the job is scaled."""


class GangAdapter(Protocol):
    """What one system of admission requires of a job's pods. All members are pure."""

    finalizer: str
    """What the system holds pods with that have ended; empty where it holds none."""

    def template(self, request: NodeRequest) -> dict[str, Any]:
        """A PodTemplateSpec to lay over what we suggest; the user's `pod_template` comes over it. None takes a field
        away."""
        ...

    def shared_objects(self, request: NodeRequest, pod: dict[str, Any]) -> Sequence[SharedObject]:
        """What must be there before the job's first pod.

        Args:
            request: any of its nodes.
            pod: that node's manifest.
        """
        ...

    def needs(self, request: NodeRequest) -> frozenset[int]:
        """Of which nodes (ranks) the pods decide whether this one can be made; empty where it always can."""
        ...

    def may_differ(self, request: NodeRequest) -> bool:
        """Whether the pod may ask for other machines than its siblings do."""
        ...

    def obstacle(self, request: NodeRequest, pods: Sequence[Pod]) -> str:
        """Why the pod must not be made yet; empty where it may.

        Args:
            request: the node.
            pods: those of the nodes that it `needs`, of all incarnations.
        """
        ...


QUEUE = "kueue.x-k8s.io/queue-name"


def queue_label(spec: JobSpec) -> dict[str, str]:
    """Names the job's queue where its reader is not known: Kueue's label, which other tools read as well."""
    return {QUEUE: spec.queue} if spec.queue else {}


class OneByOne:
    """No gang: every pod is admitted by itself."""

    finalizer = ""

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
