"""A node's agent has taken the current world, or has not."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import EvidenceSource, FailureClass
from perdure.contract.transitions import NodeCommanded, NodeUnresponsive
from perdure.workflows.policy.diagnosis import own_lines, shortages
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts.nodes import silence, with_preparation
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState


def on_commanded(state: RoleInJob, node: NodeState, commanded: NodeCommanded, now: datetime) -> RoleInJob:
    """Takes in that the node's agent has accepted a world, and whether the node has entered it."""
    if commanded.printed is not None:
        state = own_lines.take(state, node.rank, commanded.printed)
    node = node.replace(
        commanded=max(node.commanded, commanded.generation),
        entered=max(node.entered, commanded.entered or 0),
        reachable=True,
    )
    if state.world is None or commanded.generation != state.world.generation:
        return state.with_node(node)
    state = incidents.record_commands(state, commanded.time)
    has_reached_torchrun = node.preparing and not commanded.preparing
    node = with_preparation(node, preparing=commanded.preparing)
    # A command that has just reached its torchrun is asked once more.
    if has_reached_torchrun or not _has_not_entered(state, node, commanded):
        return state.with_node(node)
    why = commanded.detail or "the reason is not known"
    failure = NodeFailure(
        rank=node.rank,
        failure=FailureClass.RENDEZVOUS_TIMEOUT,
        time=commanded.time,
        source=EvidenceSource.COMMAND,
        text=f"it was given generation {commanded.generation} and has not entered it: {why}",
    )
    return interrupt(state.with_node(node), failure, now=now)


def on_unresponsive(state: RoleInJob, node: NodeState, silent: NodeUnresponsive, now: datetime) -> RoleInJob:
    """Takes in that the node's agent did not take a command, which breaks a world that needs it."""
    state = state.with_node(silence(node, shortages.worded(state, node, silent.detail, now), now))
    world = state.world
    if world is None or not state.is_member(node) or state.outcome is not None or state.between_stages:
        return state
    # A node that has entered may be too busy with its first step to take a command in time; its lease shows if it is
    # gone.
    is_stopped = silent.generation == world.generation and max(node.stepping, node.entered) < world.generation
    excused = shortages.excused_until(state, node)
    if not is_stopped or (excused is not None and now < excused):
        return state
    text = f"node {node.rank} does not take commands: {silent.detail}"
    failure = NodeFailure.unresponsive(node.rank, text, silent.time, source=EvidenceSource.COMMAND)
    return interrupt(state, failure, now=now)


def _has_not_entered(state: RoleInJob, node: NodeState, commanded: NodeCommanded) -> bool:
    """Whether this is the answer to the job's newest inquiry, and says that the node is not in its world."""
    inquired, decided = state.inquired_at, state.world_decided_at
    if (
        inquired is None
        or decided is None
        or inquired < decided
        or commanded.inquiry != state.inquiry
        or commanded.entered is None
    ):
        return False
    late = max(node.entered, node.stepping, node.finished) < commanded.generation
    return late and not commanded.preparing and state.is_member(node) and state.outcome is None
