"""Gives nodes that run more memory, where their backend can do that.

A node whose memory has run out is alive where the kernel has killed one of its ranks and not its container. It keeps
its machine, its image and what it has read, so raising its limit costs no more than the restart of the ranks. No world
is formed meanwhile: ranks that start before the limit is raised would run into it once more. A node that does not get
the memory where it runs is replaced by one that requests it, which goes wherever there is room.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import NodePhase, RaiseMemory
from perdure.contract.transitions import NodeMemoryRaised
from perdure.spec.job import JobSpec
from perdure.spec.quantities import quantity_of_bytes
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world import succession

PATIENCE = timedelta(minutes=2)
"""The time for which a node is waited for: its group reports within 90 s, and its worker may be away."""


def begin(state: RoleInJob, action: RaiseMemory, now: datetime) -> RoleInJob:
    """Has the nodes get what all new nodes request from now on."""
    for rank in action.in_place:
        node = state.nodes[rank]
        if node.alive:
            state = state.with_node(node.replace(memory=action.memory, memory_awaited_until=now + PATIENCE))
    return state


def on_raised(state: RoleInJob, node: NodeState, raised: NodeMemoryRaised) -> RoleInJob:
    """Takes in that a node has the memory, or does not get it."""
    if node.memory_awaited_until is None or raised.memory != node.memory:
        return state
    return state.with_node(node.replace(memory_awaited_until=None, memory_refused=raised.problem))


def give_up(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Replaces nodes that do not get the memory where they run."""
    for node in state.nodes.values():
        late = node.memory_awaited_until is not None and now >= node.memory_awaited_until
        why = node.memory_refused or (f"it was not raised within {PATIENCE.total_seconds():.0f} s" if late else "")
        if not why or not node.alive:
            continue
        text = f"node {node.rank} is replaced by one that requests {_memory(node)}: {why}"
        over = node.replace(memory_awaited_until=None, memory_refused="")
        state = succession.dismiss(state, over, job, now, phase=NodePhase.LOST, reason=text, failed_starts=0)
        state = incidents.waits(state, text)
    return state


def next_looks(state: RoleInJob) -> list[datetime]:
    """The times until which nodes are waited for."""
    return [node.memory_awaited_until for node in _awaited(state) if node.memory_awaited_until is not None]


def why_held(state: RoleInJob) -> str:
    """Describes, for people, which node the next world waits for; empty where it waits for none."""
    first = next(iter(_awaited(state)), None)
    return "" if first is None else f"waits until node {first.rank} has {_memory(first)} where it runs"


def _awaited(state: RoleInJob) -> list[NodeState]:
    awaited = [node for node in state.nodes.values() if node.memory_awaited_until is not None and node.alive]
    return sorted(awaited, key=lambda node: node.rank)


def _memory(node: NodeState) -> str:
    return f"{quantity_of_bytes(node.memory or 0)} of memory"
