"""TF_CONFIG, by which TensorFlow's processes find each other, made of the specification of a job.

It says the same for the whole life of the job: a service is repaired under its address.
"""

from __future__ import annotations

import json

from .capabilities import CAPABILITIES
from .job import JobSpec

TF_CONFIG_VARIABLE = "TF_CONFIG"

_IN_CLUSTER = ("chief", "master", "worker", "ps")
_BESIDE_CLUSTER = "evaluator"


def tf_config(job: JobSpec, role: str, node: int, *, host: str) -> str | None:
    """Returns the variable of one node; None if its role is none of TensorFlow's, or serves at no port.

    Args:
        job: The specification. On backends that run beside the worker all nodes have one address.
        role: The name of the node's role.
        node: The number of the node in its role.
        host: The address of all nodes.
    """
    if not CAPABILITIES[job.backend].runs_beside_worker:
        return None
    cluster = {
        name: [f"{host}:{serving.ready.port + index}" for index in range(serving.nodes.max)]
        for name in _IN_CLUSTER
        if (serving := job.roles.get(name)) is not None and serving.ready is not None
    }
    if not cluster or role not in (*cluster, _BESIDE_CLUSTER):
        return None
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": node}})
