"""What admission webhooks and policies of a cluster may make of a pod.

They add containers, labels and annotations, which are theirs. A job finds, reports and removes its pods by their labels
and their owner, so a pod that the cluster has created without these is none of it.
"""

from __future__ import annotations

from typing import Any

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes.naming import LABEL, OURS
from perdure.activities.nodes.kubernetes.watch import pods_of
from perdure.base.kubernetes import KubernetesApi, Object


async def keep_findable(api: KubernetesApi, requested: Object, made: Object) -> None:
    """Deletes a created pod that its job could not find.

    Args:
        api: the API server that has created it.
        requested: the pod as the worker requested it.
        made: the pod as the API server returned it.

    Raises:
        NodeNotYet: if it was deleted; administrators can change the webhook or policy.
    """
    changed = _changed(requested["metadata"], made["metadata"])
    if not changed:
        return
    metadata = made["metadata"]
    await api.delete(f"{pods_of(metadata['namespace'])}/{metadata['name']}", grace=0, uid=metadata["uid"])
    raise NodeNotYet(
        f"an admission webhook or policy of the cluster changes {', '.join(changed)} of its pod, by which the job "
        "finds it; leave out pods with the label app.kubernetes.io/managed-by=perdure there",
        queued=False,
    )


def _changed(requested: dict[str, Any], made: dict[str, Any]) -> list[str]:
    labels: dict[str, str] = made.get("labels", {})
    own = {name: value for name, value in requested["labels"].items() if name in OURS or name.startswith(LABEL)}
    changed = [f"the label {name}" for name, value in sorted(own.items()) if labels.get(name) != value]
    owners = {one["uid"] for one in made.get("ownerReferences", ())}
    if not {one["uid"] for one in requested["ownerReferences"]} <= owners:
        changed.append("the owner")
    return changed
