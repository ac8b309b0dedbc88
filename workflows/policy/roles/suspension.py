"""Suspensions of a whole job and of single roles, and their ends.

They are kept apart: a role that was suspended alone stays so when the job is suspended and resumed. A whole job is
suspended at once, when every role that makes a checkpoint before has made it: the others may be needed for that.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Evidence, EvidenceSource, Suspend
from perdure.spec.job import JobSpec
from perdure.spec.role_relations import roles_restarted_with
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.capacity import planned_changes
from perdure.workflows.policy.checkpoints import holds, other_size
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.facts.events import ResumeRequested, SuspendRequested
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import actions
from perdure.workflows.policy.repair.case import Verdict
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.state.role import RoleState
from perdure.workflows.policy.world import succession


def apply(state: JobState, event: SuspendRequested | ResumeRequested, job: JobSpec, now: datetime) -> JobState:
    """Applies a user's request to suspend or resume the job, or one of its roles."""
    match event:
        case SuspendRequested(role=""):
            waiting = state
            for name in _working(state):
                view = planned_changes.postpone(waiting.view(name), event, job, now)
                waiting = waiting if view is None else waiting.with_view(view)
            return waiting if waiting is not state else _suspend_all(state, event, job, now)
        case SuspendRequested() if state.suspended:
            return state.with_role(state.roles[event.role].replace(suspended_alone=True))
        case SuspendRequested():
            view = state.view(event.role)
            return state.with_view(planned_changes.postpone(view, event, job, now) or _suspend(view, event, job, now))
        case ResumeRequested(role=""):
            return _resume_all(state, event, job, now)
        case ResumeRequested():
            return _resume_alone(state, event.role, event, job, now)


def carry_out(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Carries out suspensions that have waited for checkpoints."""
    if state.outcome is not None:
        return state
    whole: SuspendRequested | None = None
    due = True
    for name, role in state.roles.items():
        request = awaited(role)
        if request is None or role.suspended_alone:
            continue
        if role.is_over:
            # It has ended before its checkpoint was durable, and the others are suspended nevertheless.
            if state.behavior >= Behavior.RELEASE_0_4:
                whole = whole if request.role else request
                state = state.with_role(role.replace(postponed=None))
            continue
        view = state.view(name)
        if not request.role:
            whole, due = request, due and planned_changes.is_due(view, now)
        elif planned_changes.is_due(view, now):
            state = state.with_view(_suspend(view, request, job, now))
    return _suspend_all(state, whole, job, now) if whole is not None and due else state


def awaited(role: RoleState) -> SuspendRequested | None:
    """The suspension that waits for a checkpoint of the role."""
    return role.postponed.suspend if role.postponed is not None else None


def is_awaited(state: JobState) -> bool:
    """Whether a user has suspended the whole job, and it is not yet: a role makes a checkpoint before."""
    requests = (awaited(role) for role in state.roles.values())
    return any(request is not None and not request.role for request in requests)


def _working(state: JobState) -> list[str]:
    """The roles that a suspension of the whole job stops."""
    return [name for name, role in state.roles.items() if not role.is_over and not role.suspended_alone]


def _suspend_all(state: JobState, request: SuspendRequested, job: JobSpec, now: datetime) -> JobState:
    for name in _working(state):
        state = state.with_view(_suspend(state.view(name), request, job, now))
    return state.replace(suspended=True)


def _suspend(state: RoleInJob, request: SuspendRequested, job: JobSpec, now: datetime) -> RoleInJob:
    """Suspends a role, and carries out what waits for the same checkpoint.

    One incident lasts from here until the resumed role steps: the cost of the suspension.
    """
    waits = awaited(state) is not None
    if waits:
        state = user_requests.carry_out_postponed(state, job, now)
    text = f"suspended by a user{user_requests.because(request.reason)}"
    state = incidents.abandon(state, now, text)
    state = incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.USER, text=text), now=now)
    if lost := holds.lost_with_nodes(state, job):
        state = incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.AGENT, text=lost), now=now)
    suspend = Suspend(alone=bool(request.role))
    state = actions.apply(
        other_size.end_memory(state), Verdict(rule=user_requests.RULE, title=text, actions=(suspend,)), now
    )
    return planned_changes.settle(state, now) if waits else state


def _resume_all(state: JobState, event: ResumeRequested, job: JobSpec, now: datetime) -> JobState:
    """Resumes the job; where it is not suspended as a whole, all roles that are."""
    if state.suspended:
        state = state.replace(suspended=False)
        for name in _working(state):
            state = state.with_view(_resume(state.view(name), event, now))
        return state
    for name in state.roles:
        state = _resume_alone(state, name, event, job, now)
    return state


def _resume_alone(state: JobState, name: str, event: ResumeRequested, job: JobSpec, now: datetime) -> JobState:
    view = state.view(name)
    if awaited(view) is not None:
        return state.with_view(planned_changes.withdraw_suspension(view))
    if not view.suspended_alone:
        return state
    state = state.with_role(state.roles[name].replace(suspended_alone=False))
    if state.suspended:
        return state
    state = state.with_view(_resume(state.view(name), event, now))
    for other in roles_restarted_with(name, job.roles):
        state = state.with_view(user_requests.follow_role(state.view(other), name, now))
    return state


def _resume(state: RoleInJob, event: ResumeRequested, now: datetime) -> RoleInJob:
    text = f"resumed by a user{user_requests.because(event.reason)}"
    state = incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.USER, text=text), now=now)
    # A role that rests looks at no time.
    state = succession.presume_ends(state, now)
    return state.replace(waiting_since=None, queued_since=None, ready_since=None)
