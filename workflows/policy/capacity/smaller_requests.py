"""Has nodes for which no machine has room request less, down to `scaling.relax`.

A node that waits for a resource which the training does not need waits for nothing. The scheduler says which resource
is short, and not how much of it is free. So a node requests no less than it was seen to need (its peak and a margin),
no less than `scaling.relax`, and that at once: steps between would cost one more pod each, and find a machine no
sooner. Memory that was raised after a kill is needed, and stays. What was chosen holds for every later node of the
role; it is never raised again but by a kill. Where the watch of the cluster sees that no machine has room for that
either, it is not tried; where the cluster is not watched, it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from perdure.contract import Evidence, EvidenceSource, NodePhase, RoomSeen, SmallerRequest
from perdure.spec.job import JobSpec
from perdure.spec.quantities import amount, quantity_of_bytes
from perdure.spec.scaling import Relax
from perdure.workflows.policy.capacity.resource_use import cores_for, memory_for, requests_of, saw_enough
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import NoRoom
from perdure.workflows.policy.world import succession

RESOURCES: Final = ("cpu", "memory")
HOLDS: Final = timedelta(minutes=5)
"""The time for which a job counts on it that no machine has room: the watch of the cluster tells it every 2 minutes."""
_SHORT: Final = re.compile(r"\bInsufficient (cpu|memory)\b")
"""The words of Kubernetes' scheduler (`NodeResourcesFit`)."""


def find(state: RoleInJob, job: JobSpec) -> tuple[SmallerRequest, ...]:
    """Returns each resource for want of which nodes have no machine, with what would do as far as that is known."""
    requests = requests_of(state, job)
    found = [_smaller(state, job, name, requests[name]) for name in RESOURCES if name in requests]
    waiting = tuple(one for one in found if one.nodes)
    if state.no_room is None or state.no_room.requests != _requests(one for one in waiting if one.relaxes):
        return waiting
    return tuple(one.replace(nowhere=one.relaxes) for one in waiting)


def relax(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Replaces nodes that have waited for a machine for as long as `scaling.relax.after` says by smaller ones."""
    allowed = _allowed(state, job)
    if allowed is None:
        return state
    chosen = [one for one in find(state, job) if one.relaxes]
    if not chosen:
        return state if state.short_since is None else state.replace(short_since=None)
    state = state if state.short_since is not None else state.replace(short_since=now)
    if state.no_room is not None and state.no_room.requests != _requests(chosen):
        state = state.replace(no_room=None)
    if state.short_since is None or now < _due(state, allowed, state.short_since):
        return state
    since, texts = state.short_since, [f"{one.enough} instead of {one.requested} of {one.resource}" for one in chosen]
    title = f"new nodes request {' and '.join(texts)}: no machine has room for more"
    nodes = [state.nodes[rank] for rank in sorted({rank for one in chosen for rank in one.nodes})]
    evidence = Evidence(
        time=now, source=EvidenceSource.BACKEND, rank=nodes[0].rank, text=f"node {nodes[0].rank}: {nodes[0].reason}"
    )
    state = observations.observe_smaller_requests(state, title, evidence, since=since, now=now)
    state = state.replace(short_since=None, smaller={**state.smaller, **_requests(chosen)})
    ranks = {node.rank for node in nodes}
    state = state.replace(of_nodes={rank: own for rank, own in state.of_nodes.items() if rank not in ranks})
    for node in nodes:
        state = succession.dismiss(state, node, job, now, phase=NodePhase.LOST, reason=title, failed_starts=0)
    return incidents.waits(state, title)


def next_looks(state: RoleInJob, job: JobSpec) -> list[datetime]:
    """The time until which a machine is waited for before less is requested."""
    allowed = _allowed(state, job)
    return [_due(state, allowed, state.short_since)] if allowed is not None and state.short_since is not None else []


def take_room(state: RoleInJob, seen: RoomSeen, now: datetime) -> RoleInJob:
    """Takes in whether a machine has room for nodes that request less."""
    return state.replace(no_room=None if seen.fits else NoRoom(requests=seen.requests, until=now + HOLDS))


def _due(state: RoleInJob, allowed: Relax, since: datetime) -> datetime:
    """The time at which less is requested: once a machine has room for that, as far as the job is told."""
    due = since + allowed.after
    return due if state.no_room is None else max(due, state.no_room.until)


def _requests(chosen: Iterable[SmallerRequest]) -> dict[str, str]:
    return {one.resource: one.enough for one in chosen}


def _allowed(state: RoleInJob, job: JobSpec) -> Relax | None:
    return job.roles[state.role].scaling.relax


def _smaller(state: RoleInJob, job: JobSpec, resource: str, requested: str) -> SmallerRequest:
    least = getattr(_allowed(state, job), resource, None)
    used = _need(state, resource, alone=least is None)
    nodes = tuple(node.rank for node in _without(state.nodes.values(), resource))
    # A node that was raised after a kill needs what it has.
    raised = resource == "memory" and state.host_memory.requested is not None
    known = [] if raised else [one for one in (least, used) if one is not None]
    enough = max(known, key=amount, default="")
    is_less = bool(enough) and amount(enough) < amount(requested)
    return SmallerRequest(
        resource=resource,
        requested=requested,
        enough=enough if is_less else "",
        measured=is_less and enough == used,
        relaxes=is_less and least is not None,
        nodes=nodes,
    )


def _need(state: RoleInJob, resource: str, *, alone: bool) -> str | None:
    """Returns what a node needs by what one was seen to use; None where that is not known.

    Whatever was seen is a bound. If nothing else says how little will do, enough must have been seen.
    """
    peaks = state.peaks
    if peaks is None or (alone and not saw_enough(peaks)):
        return None
    if resource == "cpu":
        return None if peaks.cpu is None else str(cores_for(peaks.cpu))
    return quantity_of_bytes(memory_for(peaks.memory)) if peaks.memory else None


def _without(nodes: Iterable[NodeState], resource: str) -> list[NodeState]:
    """Returns the nodes that no machine has room for, for want of the resource."""
    waiting = [node for node in nodes if node.alive and node.queued and node.phase is NodePhase.PENDING]
    return [node for node in waiting if resource in _SHORT.findall(node.reason)]
