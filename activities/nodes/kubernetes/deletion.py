"""Deletes the pods of nodes, within a time that no machine and no finalizer can extend.

The API server removes a pod's object once its kubelet has ended it and each finalizer is gone. A machine that is dead,
or a program that has been removed, never does its part. So a pod whose grace period is long over is left to the
cluster, which removes it with its machine, if no training process can run there or its job has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from perdure.activities.nodes.kubernetes.facts import (
    is_kept,
    machine_is_silent,
    processes_ended,
    training_has_started,
)
from perdure.activities.nodes.kubernetes.naming import LEAVING, NAMED, OURS, RANK, ROLE, UID, selector
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.activities.nodes.kubernetes.watch import pods_of
from perdure.base.kubernetes import Changed, KubernetesApi, Listed, Removed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import NodeRef

logger = logging.getLogger(__name__)

OVERDUE = timedelta(seconds=60)
"""Time after a pod's grace period in which its kubelet ends it: one that works kills at once, unmounts the volumes, and
reports within seconds."""


async def leave(api: KubernetesApi, path: str, pod: Pod) -> None:
    """Takes from a pod its node's name, and has the scheduler place no other pod of the job near it.

    On a machine that does not answer it stays an object for as long as the machine is registered: its successor would
    share the name with it, and wait for the same rack.
    """
    labels = pod.metadata.labels
    is_followed = bool(pod.spec.affinity.pod_affinity) and LEAVING not in labels
    changes = {**({LEAVING: "true"} if is_followed else {}), **({NAMED: None} if NAMED in labels else {})}
    if not changes:
        return
    try:
        await api.patch(path, {"metadata": {"uid": pod.metadata.uid, "labels": changes}}, insist=False)
    except KubernetesError as error:
        logger.warning("%s keeps its labels while it is deleted: %s", pod.metadata.name, error)


async def until_gone(api: KubernetesApi, nodes: Sequence[NodeRef]) -> dict[str, str]:
    """Returns when each pod is gone, is on a machine that does not answer, has ended and is kept by finalizers only, or
    is overdue.

    Returns:
        What is left, where and why, by the names of the pods that are not gone.
    """
    waiting, left = {node.name: node for node in nodes}, dict[str, str]()
    while waiting:
        with contextlib.suppress(TimeoutError):
            # A pod that becomes overdue does not change: the next list shows it.
            async with asyncio.timeout(OVERDUE.total_seconds()):
                await _follow(api, waiting, left)
    for text in left.values():
        logger.warning("%s", text)
    return left


async def _follow(api: KubernetesApi, waiting: dict[str, NodeRef], left: dict[str, str]) -> None:
    """Removes nodes from the table whose pods need no more waiting; returns when it is empty."""
    first = next(iter(waiting.values()))
    labels = labels_of(first.uid, first.role, {node.rank for node in waiting.values()})
    async with contextlib.aclosing(api.follow(pods_of(first.namespace), labels=labels)) as changes:
        async for change in changes:
            match change:
                case Listed(objects):
                    pods = {pod.metadata.name: pod for pod in map(Pod.model_validate, objects)}
                    for name in waiting.keys() - pods.keys():
                        del waiting[name]
                    for name in list(waiting):
                        _look(pods[name], waiting, left)
                case Changed(one):
                    _look(Pod.model_validate(one), waiting, left)
                case Removed(one):
                    waiting.pop(one["metadata"]["name"], None)
            if not waiting:
                return


def _look(pod: Pod, waiting: dict[str, NodeRef], left: dict[str, str]) -> None:
    name = pod.metadata.name
    if name in waiting and (why := _why_left(pod, waiting[name])):
        del waiting[name]
        left[name] = f"pod {name} is left to the cluster: {why}"


def _why_left(pod: Pod, node: NodeRef) -> str:
    """Why nothing waits for the pod's end any more; empty as long as something does."""
    machine = pod.spec.node_name or "(none)"
    if machine_is_silent(pod):
        return f"its machine {machine} does not answer, and it is removed with the machine"
    if is_kept(pod):
        return f"it has ended, and is kept by {', '.join(pod.metadata.finalizers)}"
    if not is_overdue(pod, datetime.now(UTC)):
        return ""
    runs = training_has_started(pod) and not processes_ended(pod)
    if runs and not node.winding_down:
        # Its replacement would take its rank while it trains.
        return ""
    return f"its machine {machine} has not ended it within {OVERDUE.total_seconds():.0f} s of its grace period"


def is_overdue(pod: Pod, now: datetime) -> bool:
    """Returns whether a pod that is being deleted should have been gone for a while. The API server counts its grace
    period into the time that it names."""
    due = pod.metadata.deletion_timestamp
    return due is not None and now > due + OVERDUE


def labels_of(uid: str, role: str, ranks: Iterable[int]) -> str:
    """Returns a label selector for all incarnations of some nodes."""
    return f"{selector(OURS)},{UID}={uid},{ROLE}={role},{RANK} in ({','.join(map(str, sorted(ranks)))})"
