"""Volcano's scheduler: the job's `queue` names a queue of Volcano."""

from __future__ import annotations

from typing import Any

from perdure.activities.nodes.kubernetes.gangs.adapter import OneByOne, SharedObject
from perdure.activities.nodes.kubernetes.gangs.pod_group import group_name, minimum_resources, pod_group
from perdure.contract import NodeRequest


class Volcano(OneByOne):
    """One PodGroup. Volcano preempts and reclaims the pods beyond a group's minimum one by one."""

    def template(self, request: NodeRequest) -> dict[str, Any]:
        spec: dict[str, Any] = {"schedulerName": "volcano"}
        if _network_topology(request):
            spec["affinity"] = None
        return {"metadata": {"annotations": {"scheduling.k8s.io/group-name": group_name(request)}}, "spec": spec}

    def shared_objects(self, request: NodeRequest, pod: dict[str, Any]) -> tuple[SharedObject, ...]:
        job = request.spec
        spec: dict[str, Any] = {"minMember": request.minimum, "minResources": minimum_resources(request, pod)}
        if job.queue:
            spec["queue"] = job.queue
        if job.priority_class:
            spec["priorityClassName"] = job.priority_class
        if topology := _network_topology(request):
            spec["networkTopology"] = topology
        return (pod_group(request, "scheduling.volcano.sh/v1beta1", spec),)


def _network_topology(request: NodeRequest) -> dict[str, Any] | None:
    """Returns Volcano's topology constraint if the topology's level is a number, that is, a tier of HyperNodes. A level
    that is a label of machines is expressed as pod affinity instead."""
    topology = request.spec.roles[request.node.role].topology
    level = topology and (topology.required or topology.preferred)
    if not topology or not level or not level.isdecimal():
        return None
    return {"mode": "hard" if topology.required else "soft", "highestTierAllowed": int(level)}
