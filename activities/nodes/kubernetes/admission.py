"""What admission webhooks, policies and LimitRanges of a cluster may make of a pod.

They add containers, labels and annotations, which are theirs. A job finds, reports and removes its pods by their labels
and their owner, so a pod that the cluster has created without these is none of it. Users are told of other changes of
what a job relies on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes.naming import LABEL, OURS
from perdure.activities.nodes.kubernetes.resources import amount
from perdure.activities.nodes.kubernetes.watch import pods_of
from perdure.base.kubernetes import KubernetesApi, Object
from perdure.base.kubernetes_errors import KubernetesError


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


_FIELDS: Final = (
    *("restartPolicy", "terminationGracePeriodSeconds", "hostname", "subdomain", "dnsPolicy", "hostNetwork"),
    *("schedulerName", "priorityClassName", "nodeSelector", "affinity"),
)
"""Fields of a pod on which a job relies as they were requested, beside its containers and tolerations."""
_CONTAINER_FIELDS: Final = ("command", "args", "restartPolicy")


def alterations(requested: Object, made: Object) -> str:
    """Returns what the cluster has made of a new pod otherwise than it was requested, for users; empty if nothing."""
    before, after = requested["spec"], made["spec"]
    found = [f"{field} is {after.get(field)}" for field in _FIELDS if _differs(before.get(field), after.get(field))]
    kept = after.get("tolerations") or ()
    found += [f"no toleration of {one.get('key')}" for one in before.get("tolerations") or () if one not in kept]
    for kind in ("initContainers", "containers"):
        containers = {one["name"]: one for one in after.get(kind) or ()}
        for container in before.get(kind) or ():
            name, now = container["name"], containers.get(container["name"], {})
            found += [
                f"{field} of {name} is {now.get(field)}"
                for field in _CONTAINER_FIELDS
                if _differs(container.get(field), now.get(field))
            ]
            found += _resources(name, container.get("resources") or {}, now.get("resources") or {})
    return (
        f"a LimitRange or an admission webhook of the cluster has changed its pod: {', '.join(found)}" if found else ""
    )


def _differs(requested: Any, made: Any) -> bool:
    return bool(requested) and requested != made


def _resources(container: str, requested: Mapping[str, Any], made: Mapping[str, Any]) -> Iterator[str]:
    limits: Mapping[str, Any] = requested.get("limits") or {}
    for kind in ("limits", "requests"):
        # The API server requests as much of a resource as its limit is where no request is stated.
        before: Mapping[str, Any] = {**(limits if kind == "requests" else {}), **(requested.get(kind) or {})}
        after: Mapping[str, Any] = made.get(kind) or {}
        for name in sorted(before.keys() | after.keys()):
            given = after.get(name)
            if given is None or name not in before or amount(given) != amount(before[name]):
                yield f"{kind}.{name} of {container} is {given}"


def is_of_others(error: KubernetesError, requested: Object) -> bool:
    """Returns whether the API server finds a pod invalid for values alone that the request did not set: a LimitRange or
    a webhook has, which an administrator may change."""
    return bool(error.fields) and all(_is_of_others(field, error.message, requested) for field in error.fields)


def _is_of_others(field: str, message: str, requested: Object) -> bool:
    at: Any = requested
    for name, index in _STEP.findall(field):
        at = at.get(name) if isinstance(at, dict) else None
        if index and isinstance(at, list):
            at = at[int(index)] if int(index) < len(at) else None
        if at is None:
            return True
        resource = _BEYOND_LIMIT.search(message)
        if resource and name == "resources":
            stated: Mapping[str, Mapping[str, Any] | None] = at
            return resource.group(1) not in (stated.get("limits") or {})
    return False


_STEP: Final = re.compile(r"([^.\[\]]+)(?:\[(\d+)\])?")
"""A step of the path of a field, such as `spec.containers[0].resources`."""
_BEYOND_LIMIT: Final = re.compile(r"must be less than or equal to (\S+) limit")


def _changed(requested: dict[str, Any], made: dict[str, Any]) -> list[str]:
    labels: dict[str, str] = made.get("labels", {})
    own = {name: value for name, value in requested["labels"].items() if name in OURS or name.startswith(LABEL)}
    changed = [f"the label {name}" for name, value in sorted(own.items()) if labels.get(name) != value]
    owners = {one["uid"] for one in made.get("ownerReferences", ())}
    if not {one["uid"] for one in requested["ownerReferences"]} <= owners:
        changed.append("the owner")
    return changed
