"""A node's ranks step, have stopped stepping, or step again."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import RestartCommands
from perdure.contract.transitions import (
    NodePace,
    NodeStalled,
    NodeStallEnded,
    NodeStallLook,
    NodeStepping,
    NodeStepTimes,
)
from perdure.workflows.policy.capacity import scaling
from perdure.workflows.policy.diagnosis import first_steps, hangs
from perdure.workflows.policy.facts.agent_messages import take_progress
from perdure.workflows.policy.facts.nodes import with_preparation
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState


def on_stepping(state: RoleInJob, node: NodeState, stepping: NodeStepping, now: datetime) -> RoleInJob:
    """Takes in that the node's ranks run in a world, and have made a step if it is counted."""
    first = stepping.generation > node.stepping
    node = with_preparation(node, preparing=False).replace(
        stepping=max(node.stepping, stepping.generation),
        stepped=max(node.stepped, stepping.generation) if stepping.counted else node.stepped,
        without_checkpoints=stepping.generation if stepping.saves is False else node.without_checkpoints,
        reachable=True,
    )
    if stepping.snapshots is not None:
        node = node.replace(snapshots=stepping.snapshots, snapshots_in=stepping.generation)
    state = memory.forget(state.with_node(node), RestartCommands, node.rank)
    if state.world is None or stepping.generation != state.world.generation:
        return state
    state = incidents.record_entry(state, stepping.entered_at or stepping.time)
    if first and stepping.starts is not None:
        state = incidents.record_starts(state, stepping.starts)
    return first_steps.learn(state, stepping, now) if stepping.counted and state.is_member(node) else state


def on_stalled(state: RoleInJob, node: NodeState, stalled: NodeStalled, now: datetime) -> RoleInJob:
    """Takes in that no rank of the node steps; one that has not begun to step may hang."""
    node = node.replace(stalled_in=stalled.generation, stalled_since=stalled.time, stalled_at_start=stalled.at_start)
    state = state.with_node(node)
    return first_steps.miss(state, node, stalled, now) if stalled.at_start else state


def on_stall_look(state: RoleInJob, node: NodeState, seen: NodeStallLook) -> RoleInJob:
    """Takes in where the stalled ranks of a node are."""
    return state.with_node(node.replace(look=hangs.own_look(state, node, seen.look)))


def on_stall_ended(state: RoleInJob, node: NodeState, ended: NodeStallEnded, now: datetime) -> RoleInJob:
    """Takes in that the node's ranks step again."""
    state = observations.observe_stall_ended(state, node, ended.time, now)
    return state.with_node(node.replace(stalled_in=0, stalled_since=None, stalled_at_start=False, look=None))


def on_step_times(state: RoleInJob, node: NodeState, reported: NodeStepTimes) -> RoleInJob:
    """Takes in how the steps of the node's own ranks split, in the current world."""
    world = state.world
    if world is None or reported.generation != world.generation or not state.is_member(node):
        return state
    member = world.members[node.rank]
    own = range(member.base_rank, member.base_rank + member.processes)
    times = tuple(one for one in reported.ranks if one.rank in own)
    state = state.with_node(node.replace(step_times=times, step_times_in=world.generation))
    return scaling.doubt(state.replace(new_step_times=True), world)


def on_pace(state: RoleInJob, node: NodeState, reported: NodePace) -> RoleInJob:
    """Takes in how fast the current world steps, from the node with its first rank."""
    world = state.world
    if world is None or reported.generation != world.generation or not state.is_member(node):
        return state
    if world.members[node.rank].base_rank != 0:
        return state
    state = take_progress(state, reported.progress)
    return scaling.learn(state, world, step=reported.step, spread=reported.spread, progress=reported.progress)
