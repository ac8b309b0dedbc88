"""Gangs: pods that are admitted together. `adapter` defines the interface; docs/gangs.md describes each system."""

from __future__ import annotations

from perdure.activities.nodes.kubernetes.gangs.adapter import GangAdapter, OneByOne, SharedObject
from perdure.activities.nodes.kubernetes.gangs.coscheduling import Coscheduling
from perdure.activities.nodes.kubernetes.gangs.kueue import Kueue
from perdure.activities.nodes.kubernetes.gangs.volcano import Volcano
from perdure.activities.nodes.kubernetes.gangs.workload import Workload

__all__ = ["SYSTEMS", "GangAdapter", "OneByOne", "SharedObject", "adapter_of"]

SYSTEMS = ("kueue", "volcano", "coscheduling", "workload")
"""The supported gang systems, by their names in the worker's settings."""


def adapter_of(system: str, *, elastic_priority_class: str = "") -> GangAdapter:
    """Returns the adapter for a gang system; for the empty name, the adapter without gangs.

    Raises:
        ValueError: if there is no such adapter, or it does not support a priority class.
    """
    if elastic_priority_class and system != "kueue":
        raise ValueError(f"a priority class of the elastic part is Kueue's alone, and the system is {system or 'none'}")
    match system:
        case "":
            return OneByOne()
        case "kueue":
            return Kueue(elastic_priority_class=elastic_priority_class)
        case "volcano":
            return Volcano()
        case "coscheduling":
            return Coscheduling()
        case "workload":
            return Workload()
        case _:
            raise ValueError(f"{system!r} is not a gang system; expected one of {', '.join(SYSTEMS)}, or nothing")
