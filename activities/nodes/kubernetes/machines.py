"""Follows the machines of a cluster and all pods on them, with one list and one watch of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, Final

from perdure.activities.nodes.kubernetes.naming import OURS, ROLE, UID, is_ours
from perdure.activities.nodes.kubernetes.resources import amount, requests_of
from perdure.activities.nodes.kubernetes.scheduling import most_telling
from perdure.activities.nodes.machines import Labels, Machines, MachineSeen, MachinesUnknown, Owner, Use
from perdure.base.kubernetes import Change, Changed, KubernetesApi, Listed, Object, Removed
from perdure.base.kubernetes_errors import KubernetesError

_NODES: Final = "/api/v1/nodes"
_PODS: Final = "/api/v1/pods"
_COUNTED: Final = ("cpu", "memory", "pods", "ephemeral-storage")
"""Resources without a vendor's name that are counted; huge pages and attachable volumes are left out."""
_KEEPS_AWAY: Final = ("NoSchedule", "NoExecute")
_UNREADY: Final = "node.kubernetes.io/"
"""Taints of Kubernetes itself say what the machine's conditions say."""
_ENDED: Final = ("Succeeded", "Failed")
_LONGEST_REASON: Final = 300


async def follow(api: KubernetesApi) -> AsyncGenerator[Machines]:
    """Yields the machines once nodes and pods are listed, and again after changes.

    Raises:
        MachinesUnknown: if the API server refuses to list them.
    """
    found, changed = Machines(), asyncio.Event()
    listed: set[str] = set()
    tasks = [
        asyncio.create_task(_take_in(api.follow(path, reduce=reduce), path, take, found, listed, changed))
        for path, take, reduce in ((_NODES, _take_machine, _needed_of_machine), (_PODS, _take_pod, _needed_of_pod))
    ]
    try:
        while True:
            waits = asyncio.create_task(changed.wait())
            done, _ = await asyncio.wait((waits, *tasks), return_when=asyncio.FIRST_COMPLETED)
            if waits not in done:
                waits.cancel()
            for task in tasks:
                if task in done:
                    task.result()
            changed.clear()
            if len(listed) == len(tasks):
                yield found
    except KubernetesError as error:
        if not error.unauthorized:
            raise
        raise MachinesUnknown(
            f"the API server does not let the worker list machines and all pods: {error.message}; grant it list and "
            "watch of nodes and pods (docs/operations.md)"
        ) from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_Take = Callable[[Machines, Change], None]


async def _take_in(
    followed: AsyncGenerator[Change], path: str, take: _Take, found: Machines, listed: set[str], changed: asyncio.Event
) -> None:
    async with contextlib.aclosing(followed) as changes:
        async for change in changes:
            take(found, change)
            found.events += 1
            listed.add(path)
            changed.set()


def _needed_of_machine(one: Object) -> Object:
    metadata, spec, status = one["metadata"], one.get("spec") or {}, one.get("status") or {}
    seen = MachineSeen(
        capacity=dict(_amounts(status.get("allocatable") or {})),
        taints=tuple(sorted(_taints(spec))),
        problem=_problem(spec, status),
    )
    return {"name": metadata["name"], "seen": seen, "labels": Labels(metadata.get("labels") or {})}


def _take_machine(found: Machines, change: Change) -> None:
    match change:
        case Listed(objects):
            names = {one["name"] for one in objects}
            for name in found.machines.keys() - names:
                _forget(found, name)
            for one in objects:
                _put_machine(found, one)
        case Changed(one):
            _put_machine(found, one)
        case Removed(one):
            _forget(found, one["metadata"]["name"])


def _forget(found: Machines, name: str) -> None:
    found.machines.pop(name, None)
    found.labels.pop(name, None)


def _put_machine(found: Machines, one: Object) -> None:
    found.machines[one["name"]] = one["seen"]
    found.labels[one["name"]] = one["labels"]


def _amounts(quantities: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for what, text in quantities.items():
        if what in _COUNTED or ("/" in what and not what.startswith("attachable")):
            yield what, float(amount(text))


def _taints(spec: Mapping[str, Any]) -> Iterator[str]:
    for taint in spec.get("taints") or ():
        if taint.get("effect") in _KEEPS_AWAY and not taint["key"].startswith(_UNREADY):
            yield taint["key"] + (f"={taint['value']}" if taint.get("value") else "")


_TAKES_NO_PODS: Final = {
    "DiskPressure": "its disk is almost full",
    "PIDPressure": "it has almost no process IDs left",
    "NetworkUnavailable": "its network is not set up",
}
"""Conditions of machines for which Kubernetes taints them. Pods that request memory tolerate its lack."""


def _problem(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True":
        return f"not ready: {ready.get('reason') or ready.get('message') or 'its kubelet has not reported'}"
    for condition, problem in _TAKES_NO_PODS.items():
        if conditions.get(condition, {}).get("status") == "True":
            return problem
    return "cordoned" if spec.get("unschedulable") else ""


def _needed_of_pod(one: Object) -> Object:
    return {"uid": one["metadata"]["uid"], "use": _use(one)}


def _take_pod(found: Machines, change: Change) -> None:
    match change:
        case Listed(objects):
            uids = {one["uid"] for one in objects}
            for uid in found.uses.keys() - uids:
                found.drop(uid)
            for one in objects:
                _put_pod(found, one)
        case Changed(one):
            _put_pod(found, one)
        case Removed(one):
            found.drop(one["metadata"]["uid"])


def _put_pod(found: Machines, one: Object) -> None:
    if one["use"] is None:
        found.drop(one["uid"])
    else:
        found.put(one["uid"], one["use"])


def _use(one: Object) -> Use | None:
    """What a pod uses or waits for; None once it has ended."""
    metadata, spec, status = one["metadata"], one["spec"], one.get("status") or {}
    if status.get("phase") in _ENDED or (metadata.get("deletionTimestamp") and not spec.get("nodeName")):
        return None
    labels = metadata.get("labels") or {}
    use = Use(
        machine=spec.get("nodeName") or "",
        requests={what: float(number) for what, number in requests_of(spec).items()} | {"pods": 1.0},
        owner=None,
    )
    if not (is_ours(one, OURS) and UID in labels):
        return use
    return use._replace(
        owner=Owner(labels[UID], labels.get(ROLE, "")),
        reason="" if spec.get("nodeName") else _why_waiting(status),
        tolerates=tuple(sorted(_tolerated(spec))),
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
    )


def _tolerated(spec: Mapping[str, Any]) -> Iterator[str]:
    for one in spec.get("tolerations") or ():
        key, operator = one.get("key", ""), one.get("operator", "Equal")
        if operator != "Exists":
            yield key + (f"={one['value']}" if one.get("value") else "")
        elif not key:
            yield "*"
        elif not key.startswith(_UNREADY):
            yield key


def _why_waiting(status: Mapping[str, Any]) -> str:
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return most_telling(one.get("message") or one.get("reason") or "", _LONGEST_REASON)
    return ""
