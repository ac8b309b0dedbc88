"""Gives every slot of a job a living node, and ends the nodes for which it has no place.

A node that was lost is replaced at once, a slot whose nodes are lost again and again after a pause that grows.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from perdure.contract import NodePhase
from perdure.spec.job import JobSpec
from perdure.spec.preflight import Preflight
from perdure.workflows.policy.capacity import node_avoidance, resource_use
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.state.budget import backoff
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world import stages, succession

TokenSource = Callable[[], UUID]
"""Makes the secrets of new incarnations: `workflow.uuid4`, so that a replay makes the same ones."""


def staff(state: RoleInJob, job: JobSpec, now: datetime, *, new_token: TokenSource) -> RoleInJob:
    """Gives every slot a living node, and keeps no other node."""
    state = dismiss_idle_surplus(state, job, now)
    missing: list[int] = []
    complete = stages.complete_services(state, job)
    for rank in range(state.nodes_max):
        node = state.nodes.get(rank)
        # A node that has finished is needed again if the others' world broke.
        if node is not None and (node.alive or rank in complete or stages.is_done(state, node)):
            continue
        if node is not None and node.phase is NodePhase.LOST:
            if node.not_before is None and (delay := backoff(node.failed_starts)):
                node = node.replace(not_before=node.since + delay)
                state = state.with_node(node)
            if node.not_before is not None and now < node.not_before:
                continue
            state = node_avoidance.remember(state, node)
        missing.append(rank)
    # Several nodes may have been lost on one machine.
    avoids = node_avoidance.machines_to_avoid(state, job, now) if missing else ()
    for rank in missing:
        node = state.nodes.get(rank)
        newer = NodeState(
            rank=rank,
            incarnation=node.incarnation + 1 if node else 1,
            token=new_token().hex,
            since=now,
            processes=node.processes if node else 1,
            failed_starts=node.failed_starts if node else 0,
            uncreated_since=node.uncreated_since if node else None,
            reason=succession.reason_of_successor(node) if node else "",
            avoids=avoids,
            unchecked=job.preflight is not Preflight.OFF,
            refusals=node.refusals if node else 0,
            catching_up=state.stages_complete > 0,
            memory=resource_use.memory_of_node(state, rank),
            cpu=resource_use.cpu_of_node(state, rank),
        )
        state = state.with_node(succession.succeed(state, node, newer, job, now))
    return incidents.record_avoided_machines(state, avoids)


def dismiss_all(state: RoleInJob, job: JobSpec, now: datetime, *, reason: str = "suspended") -> RoleInJob:
    """Ends all nodes of a role that needs none; their incarnation numbers are kept, so that none is ever used again."""
    if state.world is None and not any(node.alive for node in state.nodes.values()):
        # Which commands have ended was decided with the last world: without it every stage looks incomplete.
        return state.replace(interruption=None, waiting_since=None, queued_since=None, ready_since=None)
    for node in list(state.nodes.values()):
        # Outside of a complete stage every command starts over, including that of a node that ended and left before.
        ended = node.ended and state.between_stages
        if node.alive:
            changes = {"phase": NodePhase.REMOVED, "reason": reason, "store_ports": (), "ended": ended}
            state = succession.dismiss(state, node, job, now, **changes)
        else:
            state = state.with_node(node.replace(ended=ended))
    state = memory.close_interruption(state, now)
    return state.replace(world=None, waiting_since=None, queued_since=None, ready_since=None)


def dismiss_surplus(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Ends the members that the next world has no place for, before it is formed."""
    for node in state.members:
        if node.alive and node.rank >= state.nodes_max:
            state = succession.dismiss(state, node, job, now, phase=NodePhase.REMOVED, reason="scaled down")
    return state


def dismiss_idle_surplus(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Ends the nodes for which the job has no place any more, and which are in no world that trains."""
    places = state.nodes_max
    for node in [node for rank, node in state.nodes.items() if rank >= places]:
        if node.alive and (state.between_stages or not state.is_member(node)):
            state = succession.dismiss(state, node, job, now, phase=NodePhase.REMOVED, reason="scaled down")
    return state
