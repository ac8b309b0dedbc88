"""The Service of a job whose nodes know of each other: they keep their names when their pods are replaced.

It is headless: a name leads to the pod itself, at any port. The job decides which pod that is, and not the kubelet's
reports: a server goes on serving while its agent starts again or its kubelet is away. So that a name never leads to two
incarnations, a pod loses it before it is deleted.
"""

from __future__ import annotations

from perdure.activities.nodes.kubernetes.gangs import SharedObject
from perdure.activities.nodes.kubernetes.naming import JOB, NAMED, OURS, UID
from perdure.base.kubernetes import core_path
from perdure.contract import NodeRequest
from perdure.contract.names import run_name


def service_of(request: NodeRequest) -> tuple[SharedObject, ...]:
    """Returns the Service of the node's job; none for one role that serves no others, whose nodes need no names."""
    spec, uid = request.spec, request.node.uid
    if not spec.tells_addresses:
        return ()
    content = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": run_name(spec.name, uid), "labels": {**OURS, JOB: spec.name, UID: uid}},
        "spec": {"clusterIP": "None", "selector": {UID: uid, NAMED: "true"}, "publishNotReadyAddresses": True},
    }
    return (SharedObject(core_path(spec.namespace, "services"), content, mutable=False),)
