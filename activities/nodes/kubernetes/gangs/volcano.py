"""Volcano's scheduler: the job's `queue` is one of Volcano's."""

from __future__ import annotations

from typing import Any

from activities.nodes.kubernetes.gangs.adapter import OneByOne, SharedObject
from activities.nodes.kubernetes.gangs.pod_group import group_name, minimum_resources, pod_group
from workflows.messages import NodeRequest


class Volcano(OneByOne):
    """One PodGroup. Volcano preempts and reclaims what a group has beyond its minimum, pod by pod."""

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
    """Volcano counts the tiers of its HyperNodes; a level that is a label of machines is left to pod affinity."""
    topology = request.spec.role[1].topology
    level = topology and (topology.required or topology.preferred)
    if not topology or not level or not level.isdecimal():
        return None
    return {"mode": "hard" if topology.required else "soft", "highestTierAllowed": int(level)}
