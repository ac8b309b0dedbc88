"""The decisions of one job: `decide(state, event, job, now)` is everything that a TrainingJob ever decides.

It first takes in the event's facts (`apply_events`), then brings each role as far as the facts allow (`advance_role`):
judges a broken world, replaces lost nodes, forms the next world, completes, stops. `advance_job` holds what is the
job's: the order of its roles, and its end. The second part reads the state only and never the event, so the same facts
lead to the same decision in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter

from perdure.contract import BadNumber, Corruption, Failure, Finished, JobPhase, JoinRequest, NodesSuggested, RoomSeen
from perdure.contract.transitions import NodeTransition
from perdure.spec.job import JobSpec
from perdure.spec.role_relations import order_of, roles_that_end
from perdure.workflows.policy import outages
from perdure.workflows.policy.capacity import (
    admission,
    joining,
    memory_in_place,
    node_groups,
    planned_changes,
    scaling,
    smaller_requests,
    staffing,
)
from perdure.workflows.policy.capacity.staffing import TokenSource
from perdure.workflows.policy.checkpoints import commits, state_loss
from perdure.workflows.policy.diagnosis import bad_numbers, corruption, hangs, shortages, unreachable
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.facts.apply import apply_facts
from perdure.workflows.policy.facts.events import (
    AddressedEvent,
    Event,
    ForRole,
    GroupAdopted,
    GroupWoundDown,
    RelaunchRequested,
    ResumeRequested,
    ScaleRequested,
    ScalingChanged,
    SuspendRequested,
    TimePassed,
    plain,
)
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.record.phase import with_phases
from perdure.workflows.policy.repair import hold_on_failure, slow_ranks
from perdure.workflows.policy.repair.recovery import recover
from perdure.workflows.policy.roles import failures, starts, suspension
from perdure.workflows.policy.state.job import JobState, Outcome, RoleInJob
from perdure.workflows.policy.world import entering, forming, stages, succession

_LAST_DROPPED = 300
"""Characters of the description of an event that was left out."""


def decide(state: JobState, event: AddressedEvent, job: JobSpec, now: datetime, *, new_token: TokenSource) -> JobState:
    """Returns the state of the job after an event."""
    return advance_job(apply_events(state, (event,), job, now), job, now, new_token=new_token)


def decide_all(
    state: JobState,
    events: Sequence[AddressedEvent],
    job: JobSpec,
    now: datetime,
    *,
    new_token: TokenSource,
    dropped: Callable[[str], None],
) -> JobState:
    """Returns the state of the job after all events.

    An event that cannot be decided on, because it is malformed or this release has a defect, is left out and counted:
    one message must not stop a job. If the job cannot decide even without it, the error is raised: the workflow task
    fails, nothing is lost, and a release that can decide takes all events.

    Args:
        state: The job before the events.
        events: The events, in the order in which they arrived.
        job: The job's specification.
        now: The time of the decision.
        new_token: Makes the secrets of new incarnations.
        dropped: Is called with a description of each event that is left out.
    """
    try:
        known = state
        for together, run in groupby(events, lambda event: isinstance(plain(event), NodeTransition)):
            if together:
                # One decision looks at every node, and a thousand nodes report at once. Nodes that are lost at once are
                # one incident.
                known = apply_events(known, run, job, now)
                continue
            for event in run:
                known = decide(known, event, job, now, new_token=new_token)
        return decide(known, TimePassed(), job, now, new_token=new_token)
    except Exception:
        for event in events:
            try:
                state = decide(state, event, job, now, new_token=new_token)
            except Exception as error:
                what = f"{type(plain(event)).__name__}: {type(error).__name__}: {error}"[:_LAST_DROPPED]
                dropped(what)
                state = state.replace(dropped_events=state.dropped_events + 1, last_dropped=what)
        return decide(state, TimePassed(), job, now, new_token=new_token)


def apply_events(state: JobState, events: Iterable[AddressedEvent], job: JobSpec, now: datetime) -> JobState:
    """Takes in events. `advance_job` must follow."""
    for name in job.roles:
        role = state.roles[name]
        if (counted := scaling.count_nodes(role, job.roles[name], now)) is not role:
            state = state.with_role(counted)
    by_role = ((role, plain(event)) for event in events for role in _addressees(state, event))
    for role, run in groupby(by_role, itemgetter(0)):
        if role is None:
            for _, event in run:
                if isinstance(event, SuspendRequested | ResumeRequested):
                    state = suspension.apply(state, event, job, now)
            continue
        before = view = state.view(role)
        for _, event in run:
            view = _apply_to_role(view, event, job, now)
        if view is not before:
            state = state.with_view(view)
    return state


def _addressees(state: JobState, event: AddressedEvent) -> tuple[str | None, ...]:
    """The roles that an event concerns; None where the job decides on it as a whole."""
    match event:
        case SuspendRequested() | ResumeRequested():
            return (None,)
        case ForRole(role=role):
            return (state.role_named(role),)
        case Failure(sender=sender) | Finished(sender=sender) | BadNumber(sender=sender) | Corruption(sender=sender):
            # Like other senders that do not belong to the job, one of an unknown role is ignored.
            return (sender.role,) if sender.role in state.roles else ()
        case (
            NodeTransition()
            | GroupAdopted()
            | GroupWoundDown()
            | JoinRequest()
            | ScaleRequested()
            | ScalingChanged()
            | NodesSuggested()
            | RoomSeen()
            | RelaunchRequested()
        ):
            return (state.role_named(None),)
        case _:
            return tuple(state.roles)


def _apply_to_role(state: RoleInJob, event: Event, job: JobSpec, now: datetime) -> RoleInJob:
    state = joining.accept_machine(apply_facts(state, event, now), event, job, now)
    state = joining.apply_ticket(state, event, now)
    state = planned_changes.end_node(commits.apply(state, event, job, now), event, job, now)
    return user_requests.apply(state, event, job, now)


def advance_job(state: JobState, job: JobSpec, now: datetime, *, new_token: TokenSource) -> JobState:
    """Brings all roles as far as the known facts allow, in their order; a role that stops the job stops all."""
    if state.outcome is not None:
        return with_phases(hold_on_failure.end_when_due(state, now), job)
    if state.repairs_paused_until is not None and now >= state.repairs_paused_until:
        state = state.replace(repairs_paused_until=None)
    state = shortages.judge(outages.excuse(state, job, now), now)
    state = suspension.carry_out(_check_limits(starts.complete_proven(state, job), job, now), job, now)
    before = failures.restart_others(state, job, now)
    state = _advance_roles(before, job, now, new_token=new_token)
    changed = failures.restart_others_with_new_world(before, state, job, now)
    if changed is not state:
        state = _advance_roles(changed, job, now, new_token=new_token)
    state = _release_completed(_end(state, job, now), job, now)
    return with_phases(hold_on_failure.begin(state, job, now), job)


def _advance_roles(state: JobState, job: JobSpec, now: datetime, *, new_token: TokenSource) -> JobState:
    for name in order_of(job.roles):
        if state.outcome is not None:
            break
        view = state.view(name)
        if view.rests or not starts.why_waiting(view, state.roles, job):
            view = advance_role(view, job, now, new_token=new_token)
            state = state.with_view(failures.contain(view, job, now))
    return state


def advance_role(state: RoleInJob, job: JobSpec, now: datetime, *, new_token: TokenSource) -> RoleInJob:
    """Brings one role as far as the known facts allow."""
    if state.is_over:
        return state
    state = user_requests.apply_postponed(planned_changes.advance(state, now), job, now)
    state = user_requests.take_older(state_loss.judge(state, job, now), now)
    if state.outcome is not None:
        return state
    if state.rests:
        return staffing.dismiss_all(state, job, now)
    state = corruption.judge(bad_numbers.judge(slow_ranks.judge(state, job, now), job, now), now)
    state = stages.advance(state, now)
    if state.completed:
        return state
    state = entering.inquire(state, job, now)
    state = succession.presume_ends(state, now)
    state = hangs.judge(unreachable.give_up(state, job, now), job, now)
    state = recover(node_groups.replace_whole(state, job, now), job, now)
    if state.outcome is not None:
        return state
    state = node_groups.replace_whole(state, job, now)
    # The next world waits for the end of the surplus, too.
    state = staffing.dismiss_idle_surplus(scaling.follow(state, job, now), job, now)
    state = smaller_requests.relax(memory_in_place.give_up(state, job, now), job, now)
    state = forming.form(admission.admit(state, now), job, now)
    state = slow_ranks.forget_missed(staffing.staff(state, job, now, new_token=new_token))
    return observations.observe_uncreated(_note_stepping(state, now), now)


def _end(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Ends the job once the roles that end it are complete, and all roles of a job that one of them has stopped."""
    outcome = state.outcome
    ending = [state.roles[name] for name in roles_that_end(job.roles)]
    if outcome is None and all(role.completed for role in ending):
        reason = "; ".join(dict.fromkeys(role.completed for role in ending))
        outcome = Outcome(phase=JobPhase.SUCCEEDED, exit_code=0, reason=reason, decided_at=now)
    return state.stop(outcome) if outcome is not None else state


def _release_completed(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Ends the nodes of complete roles while others work."""
    for name, role in state.roles.items() if state.outcome is None else ():
        if role.completed and not role.is_idle:
            state = state.with_view(staffing.dismiss_all(state.view(name), job, now, reason="its role has completed"))
    return state


def end_of_limits(state: JobState, job: JobSpec) -> datetime | None:
    """The time at which the job is stopped however far it is; None for no limit."""
    return None if job.limits.active_deadline is None else state.started_at + job.limits.active_deadline


def _check_limits(state: JobState, job: JobSpec, now: datetime) -> JobState:
    end = end_of_limits(state, job)
    if end is not None and now >= end:
        reason = f"limits.active_deadline ({job.limits.active_deadline}) is over"
        return state.stop(Outcome(phase=JobPhase.FAILED, exit_code=5, reason=reason, decided_at=now))
    return state


def _note_stepping(state: RoleInJob, now: datetime) -> RoleInJob:
    if state.interruption is not None:
        return state
    if state.between_stages:
        return incidents.caught_up(state, now) if stages.has_recovered(state) else state
    return incidents.follow_running(state, now)
