"""A node's agent has stopped renewing its lease, or reports again: neither says anything about its ranks."""

from __future__ import annotations

from datetime import datetime

from perdure.contract.transitions import NodeReachable, NodeUnreachable
from perdure.workflows.policy.diagnosis import shortages
from perdure.workflows.policy.facts.nodes import silence, with_address
from perdure.workflows.policy.record import observations
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState


def on_unreachable(state: RoleInJob, node: NodeState, unreachable: NodeUnreachable, now: datetime) -> RoleInJob:
    """Takes in that the node's lease has lapsed."""
    return state.with_node(silence(node, shortages.worded(state, node, unreachable.detail, now), now))


def on_reachable(state: RoleInJob, node: NodeState, reachable: NodeReachable, now: datetime) -> RoleInJob:
    """Takes in that the node's agent reports again."""
    state = observations.observe_reachable(state, node, now)
    node = with_address(node, address=reachable.address, host=reachable.host)
    return state.with_node(node.replace(reachable=True, reason=node.waits))
