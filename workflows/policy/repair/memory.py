"""Remembers what the ladder did for which node, so that a rung which acts otherwise the second time needs no counter.

All actions of a decision are remembered once its interruption is over. A rung reads `times`, or `last`; the fact that
makes the next failure a first one again calls `forget`. A stage of the command begins with nothing remembered.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import RoleAction, kind_of
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.memory import Repair, RepairMemory
from perdure.workflows.policy.state.node import NodeState


def close_interruption(state: RoleInJob, now: datetime) -> RoleInJob:
    """Ends the interruption, whose decision is final then, and remembers what was done about it."""
    interruption = state.interruption
    if interruption is None:
        return state
    state = state.replace(interruption=None)
    if interruption.requested is not None:
        # Nothing was repaired.
        return state
    of_role = dict(state.memory.of_role)
    of_nodes = {kind: dict(repairs) for kind, repairs in state.memory.of_nodes.items()}
    for action in interruption.actions:
        if not action.nodes:
            of_role[action.kind] = _repeat(of_role.get(action.kind), state, now)
        for rank in action.nodes:
            repairs = of_nodes.setdefault(action.kind, {})
            repairs[rank] = _repeat(repairs.get(rank), state, now, incarnation=_incarnation(state, rank))
    return state.replace(memory=state.memory.replace(of_nodes=of_nodes, of_role=of_role))


def last(state: RoleInJob, action: type[RoleAction], rank: int) -> Repair | None:
    """What is remembered of an action on a node (slot), whichever incarnation it was for."""
    return state.memory.of_nodes.get(kind_of(action), {}).get(rank)


def times(state: RoleInJob, action: type[RoleAction], node: NodeState) -> int:
    """How often an action was taken for this incarnation of a node, since it was forgotten."""
    found = last(state, action, node.rank)
    return found.times if found is not None and found.incarnation == node.incarnation else 0


def times_for_role(state: RoleInJob, action: type[RoleAction]) -> int:
    """How often an action was taken for the whole role, since it was forgotten."""
    found = state.memory.of_role.get(kind_of(action))
    return found.times if found is not None else 0


def most_times(state: RoleInJob, action: type[RoleAction]) -> int:
    """How often an action was taken for the node that has needed it most often."""
    known = state.memory.of_nodes.get(kind_of(action), {})
    return max((times(state, action, state.nodes[rank]) for rank in known), default=0)


def forget(state: RoleInJob, action: type[RoleAction], rank: int) -> RoleInJob:
    """Forgets an action on one node (slot): the next time will be a first one."""
    kind = kind_of(action)
    known = state.memory.of_nodes.get(kind, {})
    if rank not in known:
        return state
    left = {other: repair for other, repair in known.items() if other != rank}
    return state.replace(memory=state.memory.replace(of_nodes={**state.memory.of_nodes, kind: left}))


def forget_all(state: RoleInJob, action: type[RoleAction]) -> RoleInJob:
    """Forgets an action on every node, and on the whole role."""
    kind, known = kind_of(action), state.memory
    if kind not in known.of_nodes and kind not in known.of_role:
        return state
    of_nodes = {other: repairs for other, repairs in known.of_nodes.items() if other != kind}
    of_role = {other: repair for other, repair in known.of_role.items() if other != kind}
    return state.replace(memory=known.replace(of_nodes=of_nodes, of_role=of_role))


def begin_stage(state: RoleInJob) -> RoleInJob:
    """Forgets everything after a stage: its steps say nothing about the progress of the next one."""
    checkpoints = state.checkpoints.replace(unsound=None)
    return state.replace(
        progress=None, first_step=None, stepped_within=None, memory=RepairMemory(), checkpoints=checkpoints
    )


def _repeat(before: Repair | None, state: RoleInJob, now: datetime, *, incarnation: int = 0) -> Repair:
    """What is remembered of an action that was taken once more."""
    known = before.times if before is not None and before.incarnation == incarnation else 0
    return Repair(times=known + 1, incarnation=incarnation, generation=state.generation, at=now)


def _incarnation(state: RoleInJob, rank: int) -> int:
    """The incarnation that an action was taken for: the member of the broken world, whose place another one may have
    by now. Between two worlds it is the present one."""
    member = state.world.members.get(rank) if state.world is not None and not state.between_stages else None
    return (member or state.nodes[rank]).incarnation
