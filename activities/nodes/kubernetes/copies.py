"""The memory in which a pod's agent keeps copies of what other nodes' scripts have saved: a volume of its own, so that
training code cannot change them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

from perdure.contract import NodeRequest
from perdure.spec.roles import Role
from perdure_training.snapshots.copies import RACK_VARIABLE

MOUNT: Final = "/perdure-copies"
VOLUME: Final = "perdure-copies"
_LIKE_SHM = "64Mi"
"""The size without `resources.shm`, as that of /dev/shm then."""
_UNITS = {"m": Fraction(1, 1000), "": Fraction(1)} | {
    unit: Fraction(base**power)
    for base, units in ((1000, ("k", "M", "G", "T", "P", "E")), (1024, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")))
    for power, unit in enumerate(units, 1)
}


def keeps_copies(request: NodeRequest) -> bool:
    """Whether the job's nodes keep copies for each other."""
    return request.spec.checkpoint is not None and request.spec.checkpoint.copies_to_nodes


def add_to(role: Role, *, agent: dict[str, Any], volumes: list[dict[str, Any]]) -> None:
    """Gives the agent's container the volume, and as much more memory: what is in it counts against its limit."""
    size = role.resources.shm or _LIKE_SHM
    volumes.append({"name": VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    agent["volumeMounts"] = [*agent["volumeMounts"], {"name": VOLUME, "mountPath": MOUNT}]
    resources = agent["resources"]
    limits: dict[str, str] = resources.get("limits") or {}
    if memory := limits.get("memory"):
        agent["resources"] = resources | {"limits": {**limits, "memory": str(bytes_of(memory) + bytes_of(size))}}


def tell_rack(spec: dict[str, Any], *, agent: str, training: str) -> None:
    """Gives the agent's container the rack that the training container has, which `pod_template` may change."""
    source = next(one for one in spec["containers"] if one["name"] == training)
    target = next(one for one in spec["initContainers"] if one["name"] == agent)
    target["env"] = [*target["env"], *(one for one in source["env"] if one["name"] == RACK_VARIABLE)]


def bytes_of(quantity: str) -> int:
    """The number of a quantity, as Kubernetes writes it."""
    number = quantity.rstrip("".join(_UNITS))
    return int(Fraction(number) * _UNITS[quantity.removeprefix(number)])
