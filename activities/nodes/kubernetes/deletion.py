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
from perdure.base.kubernetes import Changed, KubernetesApi, KubernetesError, Listed, Removed
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


async def until_gone(api: KubernetesApi, nodes: Sequence[NodeRef]) -> None:
    """Returns when each pod is gone, is on a machine that does not answer, has ended and is kept by finalizers only, or
    is overdue."""
    left = {node.name: node for node in nodes}
    while left:
        with contextlib.suppress(TimeoutError):
            # A pod that becomes overdue does not change: the next list shows it.
            async with asyncio.timeout(OVERDUE.total_seconds()):
                await _follow(api, left)


async def _follow(api: KubernetesApi, left: dict[str, NodeRef]) -> None:
    """Removes nodes from the table whose pods need no more waiting; returns when it is empty."""
    first = next(iter(left.values()))
    labels = labels_of(first.uid, first.role, {node.rank for node in left.values()})
    async with contextlib.aclosing(api.follow(pods_of(first.namespace), labels=labels)) as changes:
        async for change in changes:
            match change:
                case Listed(objects):
                    pods = {pod.metadata.name: pod for pod in map(Pod.model_validate, objects)}
                    for name in [name for name, node in left.items() if _is_over(pods.get(name), node)]:
                        del left[name]
                case Changed(one):
                    pod = Pod.model_validate(one)
                    if (node := left.get(pod.metadata.name)) and _is_over(pod, node):
                        del left[node.name]
                case Removed(one):
                    left.pop(one["metadata"]["name"], None)
            if not left:
                return


def _is_over(pod: Pod | None, node: NodeRef) -> bool:
    if pod is None or machine_is_silent(pod) or is_kept(pod):
        return True
    if not is_overdue(pod, datetime.now(UTC)):
        return False
    runs = training_has_started(pod) and not processes_ended(pod)
    if runs and not node.winding_down:
        # Its replacement would take its rank while it trains.
        return False
    logger.warning(
        "%s is left to the cluster: its machine %s has not ended it within %.0f s of its grace period",
        pod.metadata.name,
        pod.spec.node_name or "(none)",
        OVERDUE.total_seconds(),
    )
    return True


def is_overdue(pod: Pod, now: datetime) -> bool:
    """Returns whether a pod that is being deleted should have been gone for a while. The API server counts its grace
    period into the time that it names."""
    due = pod.metadata.deletion_timestamp
    return due is not None and now > due + OVERDUE


def labels_of(uid: str, role: str, ranks: Iterable[int]) -> str:
    """Returns a label selector for all incarnations of some nodes."""
    return f"{selector(OURS)},{UID}={uid},{ROLE}={role},{RANK} in ({','.join(map(str, sorted(ranks)))})"
