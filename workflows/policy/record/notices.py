"""What a decision changed that a job's `notifications` may tell."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from perdure.base.words import count, do
from perdure.contract import (
    IncidentView,
    Notice,
    NotifiedBudget,
    NotifiedIncident,
    NotifiedOutcome,
)
from perdure.spec.durations import format_duration
from perdure.spec.job import JobSpec
from perdure.spec.notifications import Occasion
from perdure.workflows.policy.state.budget import within_window
from perdure.workflows.policy.state.job import JobState, RoleInJob

_NEARLY = 5
"""A budget is nearly spent where at most one of so many restarts is left."""


def notices_between(before: JobState, after: JobState, job: JobSpec, now: datetime) -> Iterator[Notice]:
    """Returns what a job whose state was `before`, and is `after` since `now`, has to tell."""
    if after.incidents is not before.incidents:
        yield from _of_incidents(before, after)
    for role in after.roles:
        earlier, later = before.view(role), after.view(role)
        yield from _of_stalls(earlier, later, now)
        yield from _of_budget(earlier, later, job, now)
    if after.outcome is not None and before.outcome is None:
        outcome = after.outcome
        yield Notice(
            occasion=Occasion.COMPLETION,
            number=after.incident_count,
            time=outcome.decided_at,
            phase=after.phase,
            title=f"{outcome.phase.value.lower()}: {outcome.reason}" if outcome.reason else outcome.phase.value.lower(),
            outcome=NotifiedOutcome(phase=outcome.phase, exit_code=outcome.exit_code, reason=outcome.reason),
        )


def _of_incidents(before: JobState, after: JobState) -> Iterator[Notice]:
    known = {incident.number: incident for incident in before.incidents}
    for incident in after.incidents:
        earlier = known.get(incident.number)
        if earlier is incident or incident.observation is not None:
            continue
        if earlier is None:
            yield _notice(after, incident)
        if incident.over_at is not None and (earlier is None or earlier.over_at is None):
            yield _notice(after, incident, over_at=incident.over_at)


def _notice(job: JobState, incident: IncidentView, *, over_at: datetime | None = None) -> Notice:
    runs = (incident.stepping_at or incident.running_at) is not None
    lasted = max((over_at - incident.started_at).total_seconds(), 0.0) if over_at is not None else None
    title = f"incident {incident.number}: {incident.title}"
    if lasted is not None:
        title += f"; {'training again' if runs else 'closed'} after {lasted:.1f} s"
    return Notice(
        occasion=Occasion.INCIDENT,
        state="begun" if over_at is None else "over",
        number=incident.number,
        time=over_at or incident.started_at,
        phase=job.phase,
        title=title,
        incident=NotifiedIncident(
            number=incident.number,
            role=incident.role,
            failure=incident.failure,
            culprit=incident.culprit,
            host=incident.host,
            rule=incident.rule,
            action=incident.action,
            duration_s=lasted,
            restored=runs if over_at is not None else None,
        ),
    )


def _of_stalls(before: RoleInJob, after: RoleInJob, now: datetime) -> Iterator[Notice]:
    stalled = tuple(node.rank for node in after.stalled)
    if bool(stalled) == bool(before.stalled) or after.outcome is not None:
        return
    nodes = ", ".join(str(rank) for rank in stalled)
    title = f"stalled: the ranks of node {nodes} make no step" if stalled else "the stall is over"
    yield Notice(
        occasion=Occasion.STALL,
        state="begun" if stalled else "over",
        number=before.generation,
        time=now,
        phase=after.phase,
        title=f"{after.role}: {title}",
        stalled=stalled,
    )


def _of_budget(before: RoleInJob, after: RoleInJob, job: JobSpec, now: datetime) -> Iterator[Notice]:
    if after.restarts[-1:] == before.restarts[-1:] or not after.restarts:
        return
    most, window = job.retry.max_restarts, job.retry.window
    used, used_before = (len(within_window(one.restarts, now=now, window=window)) for one in (after, before))
    nearly = most - max(most // _NEARLY, 1)
    if used_before < max(nearly, 1) <= used:
        yield Notice(
            occasion=Occasion.BUDGET,
            number=after.restart_count,
            time=after.restarts[-1],
            phase=after.phase,
            title=f"{used} of {count(most, 'restart')} within {format_duration(window)} {do(used, 'are')} used "
            "(retry.max_restarts)",
            budget=NotifiedBudget(restarts=used, max_restarts=most, window_s=window.total_seconds()),
        )
