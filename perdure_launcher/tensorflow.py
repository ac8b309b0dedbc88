"""TF_CONFIG, by which TensorFlow's processes find each other: made at their start, when the roles of the job are known.

It names the nodes that each role is to have, at addresses that are theirs for the whole life of the job. So it is the
same after a repair, and another one after `perdure scale`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .config import LauncherConfig

TF_CONFIG_VARIABLE = "TF_CONFIG"

_IN_CLUSTER = ("chief", "master", "worker", "ps")
_BESIDE_CLUSTER = ("evaluator",)


def tensorflow_environment(config: LauncherConfig, roles: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the variable of the node's process; none where the job sets it, or where the node's role is none of
    TensorFlow's, or serves at no port.

    Args:
        config: The node.
        roles: All roles of the job, as its agent writes them.
    """
    cluster = {name: roles[name]["serves"] for name in _IN_CLUSTER if roles.get(name, {}).get("serves")}
    if TF_CONFIG_VARIABLE in config.env or config.role not in (*cluster, *(_BESIDE_CLUSTER if cluster else ())):
        return {}
    task = {"type": config.role, "index": config.slot}
    return {TF_CONFIG_VARIABLE: json.dumps({"cluster": cluster, "task": task})}
