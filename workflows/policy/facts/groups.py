"""A group has sent its whole table, or has closed; and nodes know a newer generation than the job.

These are the facts of a job that was reset, or that took over from an earlier run of itself.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Evidence, EvidenceSource, NodeFacts, NodePhase, NodeView
from perdure.contract.identity import identity_of
from perdure.contract.transitions import NodeLost
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.diagnosis import claims
from perdure.workflows.policy.facts.ends import on_lost
from perdure.workflows.policy.facts.events import GroupAdopted, GroupWoundDown
from perdure.workflows.policy.facts.nodes import fresh_ports
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import Interruption


def on_group_adopted(state: RoleInJob, event: GroupAdopted, now: datetime) -> RoleInJob:
    """Takes over the nodes of a group that already ran."""
    world = event.world
    if world is not None and state.behavior >= Behavior.RELEASE_0_4 and claims.is_possible(state, world.generation):
        # A job that was suspended has no nodes that name it, and generations are in the names of saved states.
        state = newer_generation(state, world.generation, now)
    for view in event.nodes:
        generation = view.generation if claims.is_possible(state, view.generation) else state.generation
        state = newer_generation(state, generation, now)
        ours = state.nodes.get(view.rank)
        if ours is not None and ours.incarnation > view.incarnation:
            continue
        if event.declined and ours is not None and (ours.incarnation, ours.token) == (view.incarnation, view.token):
            if view.phase is not NodePhase.LOST:
                state = state.with_node(_brought_up_to_date(ours, view))
            elif ours.alive:
                lost = NodeLost(**identity_of(view), time=view.since, detail=view.reason)
                state = on_lost(state, ours, lost, now)
            continue
        state = state.with_node(
            NodeState(
                **identity_of(view),
                **view.part(NodeFacts),
                token=view.token,
                reachable=view.reachable,
                commanded=generation,
                avoids=view.avoids,
            )
        )
    return state


def _brought_up_to_date(ours: NodeState, view: NodeView) -> NodeState:
    """A node that has stayed the same. What its group does not know of it is kept, such as that it steps."""
    # The group may have been reset as well, to a moment before the node was ready.
    older = ours.phase is NodePhase.READY and view.phase is not NodePhase.READY
    known = {} if older else view.part(NodeFacts) | {"store_ports": fresh_ports(ours, view.store_ports)}
    return ours.replace(**known, reachable=view.reachable, avoids=view.avoids)


def on_group_wound_down(state: RoleInJob, event: GroupWoundDown) -> RoleInJob:
    """Takes in that nothing of a group is left."""
    if state.outcome is None:
        # The job did not request it and continues: the group is started again.
        return state
    return state.replace(wound_down_groups=tuple(sorted({*state.wound_down_groups, event.group})))


def newer_generation(state: RoleInJob, generation: int, now: datetime) -> RoleInJob:
    """Takes in a generation that this job does not know: the job was reset, and its world is not the newest."""
    if generation <= state.generation:
        return state
    state = state.replace(generation=generation)
    if state.world is None or state.interruption is not None:
        return state
    text = f"nodes are in generation {generation}: the job took over from an earlier run of itself"
    state = incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.AGENT, text=text), now=now)
    return state.replace(interruption=Interruption(since=now, requested=text))
