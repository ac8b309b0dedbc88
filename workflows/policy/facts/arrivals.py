"""A node's agent has reported, and its command requests a world."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import EvidenceSource, FailureClass, NodePhase
from perdure.contract.transitions import NodeChecked, NodeJoined, NodePortsChanged, NodeReady
from perdure.workflows.policy.capacity import suspect_machines
from perdure.workflows.policy.diagnosis import preflight
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts.nodes import fresh_ports, with_address, with_preparation
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState


def on_joined(state: RoleInJob, node: NodeState, joined: NodeJoined, now: datetime) -> RoleInJob:
    """Takes in that the node's agent runs, and what its command does before it requests a world."""
    node = with_address(node, address=joined.address, host=joined.host)
    if joined.waits is not None:
        node = node.replace(waits=joined.waits)
        if node.waits:
            state = incidents.waits(state, f"node {node.rank}: {node.waits}")
    if joined.preparing:
        state = state.replace(prepares=True)
    elif node.phase is not NodePhase.READY:
        node = node.replace(phase=NodePhase.JOINED, since=now, reason=node.waits, queued=False, uncreated_since=None)
    node = with_preparation(node.replace(reachable=True), preparing=joined.preparing or node.preparing)
    return state.with_node(node)


def on_ready(state: RoleInJob, node: NodeState, ready: NodeReady, now: datetime) -> RoleInJob:
    """Takes in that the node's command waits for a world: its ranks, if it had any, are down."""
    world = state.world
    # Only the job decides that a stage is complete. A node that has passed more stages knows what a reset job has lost.
    state = state.replace(stages_complete=max(state.stages_complete, ready.stage))
    caught_up = ready.stage + 1 >= state.stages_complete
    node = with_preparation(node, preparing=False).replace(
        phase=NodePhase.READY,
        since=now,
        reason=ready.detail,
        waits="",
        cut_off=bool(ready.detail),
        processes=ready.processes,
        store_ports=fresh_ports(node, ready.store_ports),
        command_nodes=ready.command_nodes or node.command_nodes,
        reachable=True,
        failed_starts=0,
        uncreated_since=None,
        stage=ready.stage,
        requested_world=True,
        ended=False,
        catching_up=node.catching_up and not caught_up,
    )
    state = state.with_node(node)
    if state.between_stages:
        return state
    over = world is not None and state.is_member(node) and ready.generation >= world.generation
    if not over or state.interruption is not None or state.outcome is not None:
        return state
    # The node's own failure report may still be on the way to the job.
    failure = NodeFailure(
        rank=node.rank,
        failure=FailureClass.PEER_LOST,
        time=ready.time,
        source=EvidenceSource.PEERS,
        text=f"node {node.rank} waits for a new world",
    )
    return interrupt(state, failure, now=now, generation=ready.generation)


def on_checked(state: RoleInJob, node: NodeState, checked: NodeChecked, now: datetime) -> RoleInJob:
    """Takes in what the checks of the node's machine have found; of several runs the better one counts."""
    is_awaited = node.unchecked or node.checked_runs < node.check_runs
    if not is_awaited or checked.run <= node.checked_runs:
        return state
    checks = preflight.better(node.checks, checked.checks)
    state = state.with_node(node.replace(checks=checks, checked_runs=checked.run, checked_at=now))
    return suspect_machines.judge(state, now)


def on_ports_changed(state: RoleInJob, node: NodeState, changed: NodePortsChanged) -> RoleInJob:
    """Takes in the ports on which the node listens for the store."""
    return state.with_node(node.replace(store_ports=fresh_ports(node, changed.store_ports)))
