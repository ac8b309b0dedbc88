"""Raises the memory of a pod that runs, by the subresource `resize` of pods, which is stable since Kubernetes 1.35.

The API server takes the new request and limit, and the pod's kubelet carries them out, or says that it cannot: now
(`Deferred`), or ever on this machine (`Infeasible`). No process is restarted.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

from perdure.activities.nodes.containers import TRAINING
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.activities.nodes.kubernetes.resources import amount
from perdure.activities.nodes.kubernetes.watch import pods_of
from perdure.base.kubernetes import Changed, KubernetesApi, Listed, Removed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import NodeResize
from perdure.spec.quantities import quantity_of_bytes

_WITHIN: Final = 30.0
"""Seconds for the kubelet to answer. It looks at the pod at once, and again every minute at the latest."""
_GONE = "its pod is gone"


async def resize(api: KubernetesApi, node: NodeResize, pod: Pod) -> str:
    """Raises the memory of a pod's training container. Returns why it is not raised; empty once it is.

    Raises:
        KubernetesError: if the API server may take it later.
    """
    path, quantity = f"{pods_of(node.namespace)}/{node.name}", quantity_of_bytes(node.memory)
    training = {"name": TRAINING, "resources": {"requests": {"memory": quantity}, "limits": {"memory": quantity}}}
    content = {"metadata": {"uid": pod.metadata.uid}, "spec": {"containers": [training]}}
    try:
        if await api.patch(f"{path}/resize", content, strategic=True) is None:
            return "its API server does not change the memory of pods that run, which takes Kubernetes 1.33"
    except KubernetesError as error:
        if error.transient:
            raise
        return f"the API server refuses to raise it: {error.message}"
    answer = ""
    try:
        async with (
            asyncio.timeout(_WITHIN),
            aclosing(api.follow(pods_of(node.namespace), fields=f"metadata.name={node.name}")) as changes,
        ):
            async for change in changes:
                match change:
                    case Listed((one,)) | Changed(one):
                        now = Pod.model_validate(one)
                    case Listed() | Removed():
                        return _GONE
                if now.metadata.uid != pod.metadata.uid:
                    return _GONE
                if _has(now, node.memory):
                    return ""
                if refusal := _refusal(now):
                    return refusal
                answer = _progress(now)
    except TimeoutError:
        pass
    return f"its machine has not raised it within {_WITHIN:.0f} s{answer}"


def _has(pod: Pod, memory: int) -> bool:
    status = pod.container_status(TRAINING)
    return status is not None and amount(status.resources.limits.get("memory", "0")) >= memory


def _refusal(pod: Pod) -> str:
    """Why the kubelet does not raise it; empty where it does not say so."""
    pending = pod.condition("PodResizePending")
    if pending is None or pending.status != "True":
        return ""
    return f"its machine has no room for that ({pending.reason}: {pending.message})"


def _progress(pod: Pod) -> str:
    """What the kubelet says of a change that it carries out."""
    condition = pod.condition("PodResizeInProgress")
    return f" ({condition.reason}: {condition.message})" if condition is not None and condition.message else ""
