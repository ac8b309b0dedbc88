"""A node's backend has created it, or has not started it yet."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import NodePhase
from perdure.contract.transitions import NodePending
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState

_NOT_JOINED = (NodePhase.REQUESTED, NodePhase.PENDING, NodePhase.CREATED)


def on_created(state: RoleInJob, node: NodeState, now: datetime) -> RoleInJob:
    """Takes in that the backend has created the node."""
    if node.phase not in _NOT_JOINED:
        return state
    return state.with_node(
        node.replace(phase=NodePhase.CREATED, since=now, reason="", queued=False, uncreated_since=None)
    )


def on_pending(state: RoleInJob, node: NodeState, pending: NodePending, now: datetime) -> RoleInJob:
    """Takes in what the node waits for."""
    # The agent may report before the command's container can be created.
    if node.phase not in (*_NOT_JOINED, NodePhase.JOINED):
        return state
    refused = pending.absent and not pending.queued
    state = state.with_node(
        node.replace(
            phase=NodePhase.PENDING,
            since=now,
            reason=pending.detail,
            queued=pending.queued,
            uncreated_since=(node.uncreated_since or now) if refused else None,
        )
    )
    return incidents.waits(state, f"node {node.rank}: {pending.detail}") if pending.detail else state
