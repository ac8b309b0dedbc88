"""Turns events into known facts; it decides nothing.

Stale messages are recognized here: by the job's uid, the incarnation and its token, the sequence numbers, and the
generation that they are about.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import BadNumber, Corruption, Failure, Finished, ShardsSetAside
from perdure.contract.transitions import (
    AnyTransition,
    NodeChangedOtherwise,
    NodeChecked,
    NodeCommanded,
    NodeCommittedCheckpoint,
    NodeCreated,
    NodeCreateFailed,
    NodeEnding,
    NodeJoined,
    NodeLost,
    NodeMemoryRaised,
    NodePace,
    NodePending,
    NodePollsRefused,
    NodePortsChanged,
    NodeReachable,
    NodeReady,
    NodeRemoved,
    NodeRestoredCheckpoint,
    NodeStalled,
    NodeStallEnded,
    NodeStallLook,
    NodeStepping,
    NodeStepTimes,
    NodeStoredCheckpoint,
    NodeTransition,
    NodeUnreachable,
    NodeUnresponsive,
)
from perdure.workflows.policy.capacity.memory_in_place import on_raised
from perdure.workflows.policy.diagnosis import claims, shortages
from perdure.workflows.policy.facts.arrivals import on_checked, on_joined, on_ports_changed, on_ready
from perdure.workflows.policy.facts.bad_numbers import on_bad_number
from perdure.workflows.policy.facts.commands import on_commanded, on_unresponsive
from perdure.workflows.policy.facts.corruption import on_corruption
from perdure.workflows.policy.facts.creation import on_created, on_pending
from perdure.workflows.policy.facts.datasets import on_shards_set_aside
from perdure.workflows.policy.facts.ends import on_create_failed, on_lost, on_removed
from perdure.workflows.policy.facts.events import Event, GroupAdopted, GroupWoundDown
from perdure.workflows.policy.facts.failures import on_failure
from perdure.workflows.policy.facts.finishes import on_finished
from perdure.workflows.policy.facts.groups import newer_generation, on_group_adopted, on_group_wound_down
from perdure.workflows.policy.facts.leases import on_reachable, on_unreachable
from perdure.workflows.policy.facts.steps import (
    on_pace,
    on_stall_ended,
    on_stall_look,
    on_stalled,
    on_step_times,
    on_stepping,
)
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world import succession


def apply_facts(state: RoleInJob, event: Event, now: datetime) -> RoleInJob:
    """Takes in the event's facts."""
    match event:
        case Failure():
            return on_failure(state, event, now)
        case Finished():
            return on_finished(state, event, now)
        case BadNumber():
            return on_bad_number(state, event, now)
        case Corruption():
            return on_corruption(state, event, now)
        case NodeTransition():
            return on_transition(state, event, now)
        case GroupAdopted():
            return on_group_adopted(state, event, now)
        case GroupWoundDown():
            return on_group_wound_down(state, event)
        case ShardsSetAside():
            return on_shards_set_aside(state, event)
        case _:
            return state


def on_transition(state: RoleInJob, transition: AnyTransition, now: datetime) -> RoleInJob:
    """Takes in a change of a node, unless it is about an incarnation that the job no longer counts on."""
    if not claims.is_possible(state, transition.generation):
        what = f"node {transition.rank} has reported generation {transition.generation}, and the job is in"
        state = claims.count(state, f"{what} generation {state.generation}")
        transition = transition.replace(generation=state.generation)
    state = newer_generation(state, transition.generation, now)
    if isinstance(transition, NodeLost | NodeRemoved):
        state = succession.observe_end(state, transition)
    node = state.nodes.get(transition.rank)
    if node is None or node.incarnation != transition.incarnation or not node.alive:
        return state
    return _on_current(state, node, transition, now)


def _on_current(state: RoleInJob, node: NodeState, transition: AnyTransition, now: datetime) -> RoleInJob:
    match transition:
        case NodeCreated():
            return on_created(state, node, now)
        case NodePending():
            return on_pending(state, node, transition, now)
        case NodeJoined():
            return on_joined(state, node, transition, now)
        case NodeReady():
            return on_ready(state, node, transition, now)
        case NodeChecked():
            return on_checked(state, node, transition, now)
        case NodePortsChanged():
            return on_ports_changed(state, node, transition)
        case NodeStepping():
            return on_stepping(state, node, transition, now)
        case NodeStalled():
            return on_stalled(state, node, transition, now)
        case NodeStallLook():
            return on_stall_look(state, node, transition)
        case NodeStallEnded():
            return on_stall_ended(state, node, transition, now)
        case NodeStepTimes():
            return on_step_times(state, node, transition)
        case NodePace():
            return on_pace(state, node, transition)
        case NodeCommanded():
            return on_commanded(state, node, transition, now)
        case NodeUnresponsive():
            return on_unresponsive(state, node, transition, now)
        case NodePollsRefused():
            return shortages.on_polls_refused(state, node, transition, now)
        case NodeUnreachable():
            return on_unreachable(state, node, transition, now)
        case NodeReachable():
            return on_reachable(state, node, transition, now)
        case NodeLost():
            return on_lost(state, node, transition, now)
        case NodeCreateFailed():
            return on_create_failed(state, node, transition, now)
        case NodeMemoryRaised():
            return on_raised(state, node, transition)
        case NodeRemoved():
            return on_removed(state, node, now)
        case NodeStoredCheckpoint() | NodeCommittedCheckpoint() | NodeRestoredCheckpoint() | NodeEnding():
            # See `policy.checkpoints.commits` and `policy.capacity.planned_changes`.
            return state
        case NodeChangedOtherwise():
            return state
