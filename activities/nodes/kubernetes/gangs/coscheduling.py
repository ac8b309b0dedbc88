"""The coscheduling plugin of kubernetes-sigs/scheduler-plugins."""

from __future__ import annotations

from typing import Any

from perdure.activities.nodes.kubernetes.gangs.adapter import OneByOne, SharedObject, queue_label
from perdure.activities.nodes.kubernetes.gangs.pod_group import group_name, minimum_resources, pod_group
from perdure.contract import NodeRequest


class Coscheduling(OneByOne):
    """One PodGroup. The plugin has no queues."""

    def template(self, request: NodeRequest) -> dict[str, Any]:
        labels = {**queue_label(request.spec), "scheduling.x-k8s.io/pod-group": group_name(request)}
        # The scheduler's name in the plugins' chart. If they are part of another scheduler, pod_template names that.
        return {"metadata": {"labels": labels}, "spec": {"schedulerName": "scheduler-plugins-scheduler"}}

    def shared_objects(self, request: NodeRequest, pod: dict[str, Any]) -> tuple[SharedObject, ...]:
        spec = {"minMember": request.minimum, "minResources": minimum_resources(request, pod)}
        return (pod_group(request, "scheduling.x-k8s.io/v1alpha1", spec),)
