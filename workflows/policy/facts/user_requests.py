"""User requests, as facts of the state: decided on like any other, and named wherever one is the reason.

A request is seldom fulfilled at once: a world cannot grow before its nodes are ready. So the requester and the reason
are kept by slot until a world has followed.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from perdure.contract import Evidence, EvidenceSource, JobPhase, NodePhase, NodesSuggested, RoomSeen, World
from perdure.spec.job import JobSpec
from perdure.workflows.policy.capacity import new_goal, planned_changes, scaling, shared_nodes, smaller_requests
from perdure.workflows.policy.checkpoints import other_size, state_loss
from perdure.workflows.policy.facts.events import (
    CancelRequested,
    Event,
    RelaunchRequested,
    RepairsPaused,
    RepairsResumed,
    RestartRequested,
    ScaleRequested,
    ScalingChanged,
)
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import hold_on_failure
from perdure.workflows.policy.state.job import Outcome, RoleInJob
from perdure.workflows.policy.state.role import Interruption
from perdure.workflows.policy.world import succession

RULE = 'user/1 "requested by a user"'


def apply(state: RoleInJob, event: Event, job: JobSpec, now: datetime) -> RoleInJob:
    """Applies a user's request to the state, or what the watch of its cluster tells."""
    match event:
        case NodesSuggested():
            return shared_nodes.follow(state, event, job, now)
        case RoomSeen():
            return smaller_requests.take_room(state, event, now)
        case ScaleRequested():
            state = planned_changes.forget_refusal(state)
            state = state_loss.resize(state, older=event.older)
            return _scale(other_size.forget(state) if event.older else state, event)
        case ScalingChanged():
            return new_goal.follow(state, event, job, now)
        case RestartRequested() if event.older and not state_loss.awaits(state):
            # The ranks of another role wait. This one trains, and would begin below a state that it has.
            return state
        case RestartRequested():
            text = f"restart requested by a user{because(event.reason)}"
            if event.older:
                text = f"restart with an older state requested by a user{because(event.reason)}"
                state = state_loss.accept_older(state)
            return request(_end_pause(state, text, now), text, now, restarts_all=True)
        case RelaunchRequested():
            return planned_changes.postpone(state, event, job, now) or _relaunch(state, event, job, now)
        case RepairsPaused():
            return state.replace(repairs_paused_until=event.until, repairs_paused_because=event.reason)
        case RepairsResumed():
            return state.replace(repairs_paused_until=None)
        case CancelRequested():
            if state.outcome is not None:
                return hold_on_failure.release(state)
            reason = f"cancelled: {event.reason}" if event.reason else "cancelled by a user"
            return state.stop(Outcome(phase=JobPhase.CANCELLED, exit_code=4, reason=reason, decided_at=now))
        case _:
            return state


def apply_postponed(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Carries out the requests that have waited for a checkpoint, once nothing is waited for any longer."""
    postponed = state.postponed
    if postponed is None or not postponed.requested or postponed.suspend is not None or state.outcome is not None:
        return state
    if not planned_changes.is_due(state, now):
        return state
    return planned_changes.settle(carry_out_postponed(state, job, now), now)


def carry_out_postponed(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Ends and replaces the nodes that have waited for a checkpoint."""
    postponed = state.postponed
    if postponed is None:
        return state
    state = planned_changes.release_nodes(state, postponed.endings)
    for relaunch in postponed.relaunches:
        state = _relaunch(state, relaunch, job, now)
    return state


def take_older(state: RoleInJob, now: datetime) -> RoleInJob:
    """Restarts ranks that wait for a state which does not come back, so that they continue with what there is."""
    because = state.checkpoints.older_because
    if not because or not state_loss.awaits(state) or state.interruption is not None:
        return state
    return request(state, because, now, by_user=False)


def follow_role(state: RoleInJob, other: str, now: datetime) -> RoleInJob:
    """Starts the role again because another one does."""
    return request(state, f"starts again with role {other}", now, by_user=False, begun_by=other, restarts_all=True)


def request(
    state: RoleInJob, text: str, now: datetime, *, by_user: bool = True, begun_by: str = "", restarts_all: bool = False
) -> RoleInJob:
    """Opens an interruption without a failure, unless one is open already.

    Args:
        state: The role.
        text: What is requested, for users.
        now: The time.
        by_user: Whether a user requests it.
        begun_by: The role with which this one starts again.
        restarts_all: Whether processes that depend on no world are restarted, too.
    """
    if state.world is None or state.between_stages:
        return state
    if state.interruption is not None and state.interruption.requested is None:
        return state
    source = EvidenceSource.USER if by_user else EvidenceSource.AGENT
    state = incidents.add_evidence(state, Evidence(time=now, source=source, text=text), now=now)
    return state.replace(
        interruption=Interruption(
            since=now, requested=text, by_user=by_user, begun_by=begun_by, restarts_all=restarts_all
        )
    )


def _end_pause(state: RoleInJob, text: str, now: datetime) -> RoleInJob:
    """Has ranks restarted at once that would be restarted after a pause."""
    interruption = state.interruption
    if interruption is None or interruption.decided or not interruption.waits:
        return state
    state = incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.USER, text=text), now=now)
    return state.replace(interruption=interruption.replace(unpaused=True))


def reasons(state: RoleInJob, ranks: Collection[int]) -> str:
    """The requests that add or remove these nodes (slots); empty where there are none."""
    return "; ".join(
        dict.fromkeys(state.request_reasons[rank] for rank in sorted(ranks) if rank in state.request_reasons)
    )


def settle(state: RoleInJob, world: World) -> RoleInJob:
    """Keeps the requests that this world does not fulfill: those for nodes that are not ready yet."""
    left = {
        rank: text
        for rank, text in state.request_reasons.items()
        if rank not in world.members and rank < state.nodes_max
    }
    return state.replace(request_reasons=left)


def _scale(state: RoleInJob, event: ScaleRequested) -> RoleInJob:
    count = f"{event.minimum}" if event.minimum == event.maximum else f"{event.minimum}:{event.maximum}"
    older = ", with an older state where the newest would be lost," if event.older else ""
    text = f"scale to {count}{older} requested by a user{because(event.reason)}"
    state = _with_requests(state, event)
    came_or_went = range(min(state.nodes_max, event.maximum), max(state.nodes_max, event.maximum))
    return scaling.allow(state).replace(
        nodes_min=event.minimum,
        nodes_max=event.maximum,
        ready_since=None,
        request_reasons=state.request_reasons | dict.fromkeys(came_or_went, text),
    )


def _with_requests(state: RoleInJob, event: ScaleRequested) -> RoleInJob:
    """Has new nodes request what a user says, whatever the job has found that they need."""
    if not event.resources:
        return state
    if "memory" in event.resources:
        state = state.replace(host_memory=state.host_memory.replace(requested=None))
    return state.replace(smaller={**state.smaller, **event.resources}, of_nodes={})


def _relaunch(state: RoleInJob, event: RelaunchRequested, job: JobSpec, now: datetime) -> RoleInJob:
    node = state.nodes.get(event.rank)
    if node is None or not node.alive or event.incarnation not in (0, node.incarnation):
        return state
    text = f"replacement of node {event.rank} requested by a user{because(event.reason)}"
    if event.resources:
        own = {**state.of_nodes.get(event.rank, {}), **event.resources}
        state = state.replace(of_nodes={**state.of_nodes, event.rank: own})
    if state.is_member(node):
        state = request(state, text, now)
    state = state.replace(request_reasons=state.request_reasons | {event.rank: text})
    return succession.dismiss(state, node, job, now, phase=NodePhase.LOST, reason=text, failed_starts=0)


def because(reason: str) -> str:
    """The user's reason, as the end of a sentence; empty where there is none."""
    return f": {reason}" if reason else ""
