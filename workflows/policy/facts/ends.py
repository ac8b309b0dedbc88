"""A node has ended, could not be created, or is deleted, as its backend reports."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import EvidenceSource, FailureClass, LossCause, NodePhase
from perdure.contract.transitions import NodeCreateFailed, NodeLost
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts.nodes import lose
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState, RanOut


def on_lost(state: RoleInJob, node: NodeState, lost: NodeLost, now: datetime) -> RoleInJob:
    """Takes in that the node's processes have ended, which breaks a world that needs it."""
    needed = _is_needed(state, node)
    state = lose(state, node.replace(host=lost.host or node.host), now, lost.detail, lost.cause)
    if not needed:
        return state
    ran_out = RanOut(requested=node.memory) if lost.out_of_memory else None
    return _break_world(state, lost, _failure_of(lost.cause), "lost", now, ran_out=ran_out)


def on_create_failed(state: RoleInJob, node: NodeState, refusal: NodeCreateFailed, now: datetime) -> RoleInJob:
    """Takes in that the backend refuses the node, which ends a job that has never trained."""
    # The specification itself cannot be started, by this node or any other.
    launch = refusal.cause is LossCause.JOB
    what = "cannot be started" if launch else "was refused"
    needed = _is_needed(state, node)
    state = lose(state, node, now, refusal.detail, refusal.cause)
    if state.generation:
        # The specification has trained, so the refusal may end: a world that trains is not ended by it, and one that
        # lacks the node waits for it.
        lost = state.nodes[node.rank]
        state = state.with_node(lost.replace(uncreated_since=lost.uncreated_since or now))
        state = incidents.waits(state, _text(refusal, what))
        return _break_world(state, refusal, _failure_of(refusal.cause), what, now) if needed else state
    return _break_world(state, refusal, FailureClass.LAUNCH if launch else FailureClass.CREATE_FAILED, what, now)


def on_removed(state: RoleInJob, node: NodeState, now: datetime) -> RoleInJob:
    """Takes in that the node is deleted."""
    return state.with_node(node.replace(phase=NodePhase.REMOVED, since=now))


def _is_needed(state: RoleInJob, node: NodeState) -> bool:
    """Whether the current world includes the node, and its ranks have not finished."""
    done = state.world is not None and node.finished >= state.world.generation
    return state.is_member(node) and not (done and (node.ended or not state.between_stages))


_FAILURES = {
    LossCause.WANTED: FailureClass.DISRUPTED,
    LossCause.PREEMPTED: FailureClass.PREEMPTED,
    LossCause.EVICTED: FailureClass.EVICTED,
}


def _failure_of(cause: LossCause) -> FailureClass:
    return _FAILURES.get(cause, FailureClass.NODE_LOST)


def _text(end: NodeLost | NodeCreateFailed, what: str) -> str:
    return f"node {end.rank} {what}: {end.detail or 'no reason given'}"


def _break_world(
    state: RoleInJob,
    end: NodeLost | NodeCreateFailed,
    failure: FailureClass,
    what: str,
    now: datetime,
    *,
    ran_out: RanOut | None = None,
) -> RoleInJob:
    if state.outcome is not None:
        return state
    reported = NodeFailure(
        rank=end.rank,
        failure=failure,
        time=end.time,
        source=EvidenceSource.BACKEND,
        text=_text(end, what),
        ran_out=ran_out,
    )
    return interrupt(state, reported, now=now)
