"""Gangs: pods that are admitted together. `adapter` has the seam, docs/gangs.md says what each system does with it."""

from __future__ import annotations

from activities.nodes.kubernetes.gangs.adapter import GangAdapter, OneByOne, SharedObject
from activities.nodes.kubernetes.gangs.coscheduling import Coscheduling
from activities.nodes.kubernetes.gangs.kueue import Kueue
from activities.nodes.kubernetes.gangs.volcano import Volcano
from activities.nodes.kubernetes.gangs.workload import Workload

__all__ = ["SYSTEMS", "GangAdapter", "OneByOne", "SharedObject", "adapter_of"]

SYSTEMS = ("kueue", "volcano", "coscheduling", "workload")
"""What a site may have, by the names that it says them with."""


def adapter_of(system: str, *, elastic_priority_class: str = "") -> GangAdapter:
    """The adapter of a site that has this system; the empty name is none.

    Raises:
        ValueError: if there is no such adapter, or it has no use for the priority class.
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
            raise ValueError(f"{system!r} is no gang system; expected one of {', '.join(SYSTEMS)}, or nothing")
