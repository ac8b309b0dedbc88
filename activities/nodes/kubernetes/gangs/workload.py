"""Kubernetes' own scheduler, as of release 1.36: an alpha API behind the feature gates GenericWorkload and
GangScheduling."""

from __future__ import annotations

from typing import Any

from perdure.activities.nodes.kubernetes.gangs.adapter import OneByOne, SharedObject, queue_label
from perdure.activities.nodes.kubernetes.gangs.pod_group import group_name, pod_group
from perdure.contract import NodeRequest


class Workload(OneByOne):
    """One PodGroup without a Workload object, which would only be a template for more groups."""

    def template(self, request: NodeRequest) -> dict[str, Any]:
        return {
            "metadata": {"labels": queue_label(request.spec)},
            "spec": {"schedulingGroup": {"podGroupName": group_name(request)}},
        }

    def shared_objects(self, request: NodeRequest, pod: dict[str, Any]) -> tuple[SharedObject, ...]:
        spec = {"schedulingPolicy": {"gang": {"minCount": request.minimum}}}
        return (pod_group(request, "scheduling.k8s.io/v1alpha2", spec, mutable=False),)
