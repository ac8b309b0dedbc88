"""Files an observation among a job's incidents, whatever it is of: as a new entry, or in one that has begun."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

from perdure.contract import Considered, Evidence, IncidentView, Observation
from perdure.workflows.policy.record.incidents import KEPT_EVIDENCE, KEPT_INCIDENTS
from perdure.workflows.policy.state.job import RoleInJob

KEPT = 10
"""Observations that a job keeps; older ones make room for incidents."""


def begun(state: RoleInJob, is_of: Callable[[Observation], bool]) -> IncidentView | None:
    """Returns the newest observation of the role's present world that is of this kind."""
    return next(
        (
            one
            for one in reversed(state.own_incidents)
            if one.observation is not None and one.generation_before == state.generation and is_of(one.observation)
        ),
        None,
    )


def new_entry(
    state: RoleInJob,
    observation: Observation,
    title: str,
    *,
    at: datetime,
    now: datetime,
    evidence: Iterable[Evidence],
    considered: tuple[Considered, ...],
) -> IncidentView:
    """Returns an entry that is closed from its beginning, and counted after the last one.

    Args:
        state: The job.
        observation: What was seen.
        title: The same for people.
        at: When it began.
        now: The present time.
        evidence: What shows it; the first pieces are kept.
        considered: Why nothing was done.
    """
    return IncidentView(
        number=state.incident_count + 1,
        role=state.role,
        title=title,
        started_at=at,
        noticed_at=now,
        closed_at=now,
        observation=observation,
        evidence=tuple(evidence)[:KEPT_EVIDENCE],
        considered=considered,
        generation_before=state.generation,
        nodes_before=state.world.nodes if state.world else 0,
    )


def add_sign(entry: IncidentView, sign: Evidence) -> IncidentView:
    """Returns the entry with one more piece of evidence, where there is room."""
    return entry.replace(evidence=(*entry.evidence, sign)[:KEPT_EVIDENCE])


def put(state: RoleInJob, entry: IncidentView) -> RoleInJob:
    """Files an entry in the place of the one of its number, or as the newest."""
    if all(one.number != entry.number for one in state.incidents):
        return append(state, state.incidents, entry)
    return state.replace(incidents=tuple(entry if one.number == entry.number else one for one in state.incidents))


def append(state: RoleInJob, kept: tuple[IncidentView, ...], entry: IncidentView) -> RoleInJob:
    """Adds an observation to the entries that are kept, or one in the place of an older one of its number."""
    observed = [one.number for one in (*kept, entry) if one.observation is not None]
    forgotten = set(observed[:-KEPT])
    incidents = tuple(one for one in (*kept, entry) if one.number not in forgotten)[-KEPT_INCIDENTS:]
    return state.replace(incidents=incidents, incident_count=max(state.incident_count, entry.number))
