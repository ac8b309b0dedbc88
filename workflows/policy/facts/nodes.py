"""Changes of a node's state that several facts have in common."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import LossCause, NodePhase
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState

_PREPARES = "its command runs and has not started its torchrun yet; only limits.active_deadline ends that"


def with_preparation(node: NodeState, *, preparing: bool) -> NodeState:
    """Updates the node with its agent's report about work before the command's torchrun."""
    if node.preparing is preparing:
        return node
    return node.replace(preparing=preparing, reason=_PREPARES if preparing else "")


def with_address(node: NodeState, *, address: str, host: str) -> NodeState:
    """Updates the node with where it runs, as far as that is reported."""
    return node.replace(address=address or node.address, host=host or node.host)


def fresh_ports(node: NodeState, reported: tuple[int, ...]) -> tuple[int, ...]:
    """Ports that no generation has used; a report may be older than the last use."""
    return tuple(port for port in reported if port not in node.used_ports) or node.store_ports


def silence(node: NodeState, reason: str, now: datetime) -> NodeState:
    """Updates the node whose agent does not answer."""
    return node.replace(
        reachable=False, reason=reason, silent_since=now if node.reachable else node.silent_since or now
    )


def lose(state: RoleInJob, node: NodeState, now: datetime, reason: str, cause: LossCause) -> RoleInJob:
    """Records that an incarnation is gone."""
    never_ready = node.phase is not NodePhase.READY and not state.is_member(node)
    return state.with_node(
        node.replace(
            phase=NodePhase.LOST,
            since=now,
            reason=reason,
            loss_cause=cause,
            failed_starts=node.failed_starts + 1 if never_ready else 0,
            store_ports=(),
        )
    )
