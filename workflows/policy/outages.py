"""Gives the waits of a job their time again that ended while no worker could decide.

A worker that comes back takes in the passing of time before the reports that wait at the server. And what the job had
requested may not even have been begun: nodes were neither created nor ended. So the end of a wait counts only where the
job decides at that time: a node is not given up, a state not taken for lost, and a job not stopped, because nothing
could be learned of them.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.capacity import (
    admission,
    memory_in_place,
    missing_nodes,
    planned_changes,
    smaller_requests,
    waiting,
)
from perdure.workflows.policy.checkpoints import state_loss
from perdure.workflows.policy.diagnosis import unreachable
from perdure.workflows.policy.facts.agent_messages import CONTROL_LAG, CONTROL_LAG_GRACE
from perdure.workflows.policy.repair import slow_ranks
from perdure.workflows.policy.repair.case import Case
from perdure.workflows.policy.repair.rungs import await_reports
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.world import forming, succession

LONGEST = timedelta(minutes=10)
"""The longest time that a wait is given again, or as long as its end is over: nodes come within it."""


def excuse(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Gives all waits their time again that ended long before this decision."""
    if state.behavior < Behavior.RELEASE_0_4:
        return state
    for name, role in state.roles.items():
        before = view = state.view(name)
        if role.is_over:
            continue
        view = planned_changes.begin_again(view, job, now)
        if view.rests:
            # It waits for nothing else, so it has not looked at that time.
            state = state if view is before else state.with_view(view)
            continue
        view = _excuse_wait_for_nodes(view, job, now)
        view = _excuse_wait_for_larger_world(view, job, now)
        view = _excuse_last_call(view, job, now)
        view = _excuse_wait_for_reports(view, job, now)
        view = _excuse_wait_for_state(view, job, now)
        view = _excuse_waits_for_room(view, job, now)
        view = _excuse_ends(view, job, now)
        view = _excuse_agents(view, job, now)
        if view is not before:
            state = state.with_view(view)
    return state


def _is_late(end: datetime | None, now: datetime) -> bool:
    return end is not None and now - end > CONTROL_LAG


def _again(patience: timedelta, end: datetime, now: datetime) -> timedelta:
    return min(patience, max(LONGEST, now - end))


def _excuse_wait_for_nodes(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    limit = waiting.limit_of(state, job)
    since = state.queued_since if state.waiting_since is None else state.waiting_since
    if limit is None or since is None or not _is_late(limit.at, now):
        return state
    moved = since + (now - limit.at) + _again(limit.at - since, limit.at, now)
    return state.replace(**{"queued_since" if state.waiting_since is None else "waiting_since": moved})


def _excuse_wait_for_larger_world(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    role, since = job.roles[state.role], state.scaling.awaited_since
    end = missing_nodes.end_of_wait(state, role)
    if since is None or end is None or not _is_late(end, now):
        return state
    moved = now - role.scaling.patience + _again(role.scaling.patience, end, now)
    return state.replace(scaling=state.scaling.replace(awaited_since=moved))


def _excuse_last_call(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """A world that is formed without nodes whose reports wait is formed again at once."""
    has_one = not state.is_due and (state.world is None or state.interruption is None)
    is_missed = has_one and _is_late(forming.next_look(state, job), now)
    return state.replace(ready_since=now) if is_missed else state


def _excuse_wait_for_reports(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """The report of the rank that failed first may wait, and those of its peers have been taken in."""
    interruption = state.interruption
    if interruption is None or interruption.decided or interruption.waits or interruption.excused:
        return state
    end = await_reports.end_of_wait(Case(state, interruption, job, now))
    if end is None or not _is_late(end, now):
        return state
    more = now - end + _again(end - interruption.since, end, now)
    return state.replace(interruption=interruption.replace(excused=more))


def _excuse_wait_for_state(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    end, awaited = state_loss.next_look(state, job), state.checkpoints.awaited
    if end is None or awaited is None or not _is_late(end, now):
        return state
    more = now - end + _again(end - awaited.since, end, now)
    return state.replace(checkpoints=state.checkpoints.replace(awaited=awaited.replace(excused=awaited.excused + more)))


def _excuse_waits_for_room(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Nodes may have been given the memory, or a machine, for which they wait."""
    for node in state.nodes.values():
        if node.alive and _is_late(node.memory_awaited_until, now):
            state = state.with_node(node.replace(memory_awaited_until=now + memory_in_place.PATIENCE))
    [end] = smaller_requests.next_looks(state, job) or [None]
    if end is None or state.short_since is None or not _is_late(end, now):
        return state
    return state.replace(short_since=state.short_since + (now - end) + _again(end - state.short_since, end, now))


def _excuse_ends(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Nodes that were to end may not have been told."""
    until = now + succession.patience(job)
    if any(_is_late(node.until, now) for node in state.leaving):
        leaving = (node.replace(until=until) if _is_late(node.until, now) else node for node in state.leaving)
        state = state.replace(leaving=tuple(leaving))
    for node in succession.waiting_nodes(state):
        if _is_late(node.predecessor_until, now):
            state = state.with_node(node.replace(predecessor_until=until))
    return state


def _excuse_agents(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Agents take a moment to poll again, and their reports one to arrive."""
    ends = (
        *admission.ends_of_checks(state),
        *unreachable.ends_of_silence(state, job),
        slow_ranks.end_of_suspicion(state, job),
    )
    excused = state.control_lag_until
    if any(_is_late(end, now) and (excused is None or end is None or excused < end) for end in ends):
        return state.replace(control_lag_until=now + CONTROL_LAG_GRACE)
    return state
