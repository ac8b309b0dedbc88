"""The story of each interruption, told while it happens: what was seen, what it means, what was done and what not.

An incident lasts from the first sign until the world steps again. A failure before that belongs to the same one: a
node found dead while its peers restart is the cause of what they reported first, not another story.
"""

from __future__ import annotations

from datetime import datetime

from workflows.messages import Considered, Evidence, EvidenceSource, FailureClass, IncidentView, RankStarts
from workflows.policy.state import JobState

KEPT_INCIDENTS = 50
"""Older ones are in the workflow's history; these ride through continue-as-new."""

KEPT_EVIDENCE = 24

_LOG_TAIL = 2000


def sighted(
    state: JobState,
    *,
    now: datetime,
    time: datetime,
    source: EvidenceSource,
    text: str,
    rank: int | None = None,
    log_tail: str = "",
) -> JobState:
    """Adds evidence to the open incident, or opens one."""
    evidence = Evidence(time=time, source=source, rank=rank, text=text)
    incident = state.open_incident
    if incident is None:
        incident = IncidentView(
            number=state.incident_count + 1,
            title=text,
            started_at=time,
            noticed_at=now,
            evidence=(evidence,),
            generation_before=state.generation,
            nodes_before=state.world.nodes if state.world else 0,
            step_before=state.progress.step if state.progress else None,
            log_tail=log_tail[-_LOG_TAIL:],
        )
        return state.changed(
            incidents=(*state.incidents, incident)[-KEPT_INCIDENTS:], incident_count=state.incident_count + 1
        )
    known = incident.evidence
    return _replace_last(
        state,
        incident.model_copy(
            update={
                "evidence": known if evidence in known else (*known, evidence)[-KEPT_EVIDENCE:],
                "started_at": min(incident.started_at, time),
                "log_tail": incident.log_tail or log_tail[-_LOG_TAIL:],
            }
        ),
    )


def decided(
    state: JobState,
    *,
    now: datetime,
    title: str,
    rule: str,
    action: str,
    failure: FailureClass | None = None,
    culprit: int | None = None,
    considered: tuple[Considered, ...] = (),
) -> JobState:
    """Writes down the decision; a later one for the same incident replaces it."""
    incident = state.open_incident
    if incident is None:
        return state
    if incident.failure is not None and failure is None:
        # A wish, or a node that came in time, while a failure is being repaired: the failure stays the story.
        return _replace_last(state, incident.model_copy(update={"action": f"{incident.action}; {action}"}))
    return _replace_last(
        state,
        incident.model_copy(
            update={
                "title": title,
                "failure": failure,
                "culprit": culprit,
                "decided_at": now,
                "rule": rule,
                "action": action,
                "considered": considered,
                "commanded_at": None,
                "entered_at": None,
            }
        ),
    )


def avoiding(state: JobState, machines: tuple[str, ...]) -> JobState:
    """New nodes were asked for, and are to keep away from these machines."""
    incident = state.open_incident
    if incident is None or not machines:
        return state
    return _replace_last(state, incident.model_copy(update={"avoided": machines}))


def waits(state: JobState, text: str) -> JobState:
    """A node that is needed to go on does not come, and says why; the newest reason stays."""
    incident = state.open_incident
    return state if incident is None else _replace_last(state, incident.model_copy(update={"waited_for": text}))


def formed(state: JobState) -> JobState:
    """The next world was handed out."""
    incident = state.open_incident
    if incident is None or state.world is None:
        return state
    return _replace_last(
        state,
        incident.model_copy(update={"generation_after": state.world.generation, "nodes_after": state.world.nodes}),
    )


def commanded(state: JobState, time: datetime) -> JobState:
    """One more agent has the new world; the last one counts."""
    incident = _of_current_world(state)
    if incident is None:
        return state
    return _replace_last(state, incident.model_copy(update={"commanded_at": _later(incident.commanded_at, time)}))


def entered(state: JobState, time: datetime) -> JobState:
    """One more member's rendezvous returned; the last one counts."""
    incident = _of_current_world(state)
    if incident is None:
        return state
    return _replace_last(state, incident.model_copy(update={"entered_at": _later(incident.entered_at, time)}))


def started(state: JobState, starts: RankStarts) -> JobState:
    """One more member's ranks step, and its agent says how they were started."""
    incident = _of_current_world(state)
    if incident is None:
        return state
    known = incident.starts
    return _replace_last(state, incident.model_copy(update={"starts": known + starts if known else starts}))


def closed(state: JobState, time: datetime) -> JobState:
    """The world steps again."""
    incident = state.open_incident
    if incident is None:
        return state
    return _replace_last(state, incident.model_copy(update={"stepping_at": time}))


def abandoned(state: JobState, time: datetime, how: str) -> JobState:
    """What was being repaired, if anything, is not wanted any more."""
    incident = state.open_incident
    if incident is None:
        return state
    if incident.decided_at is None:
        state = decided(state, now=time, title=incident.title, rule=how, action=how)
    return closed(state, time)


def _of_current_world(state: JobState) -> IncidentView | None:
    """The incident that the current world ended; an acknowledgement may come after the first steps."""
    if state.world is None or not state.incidents:
        return None
    incident = state.incidents[-1]
    return incident if incident.generation_after == state.world.generation else None


def _later(known: datetime | None, time: datetime) -> datetime:
    return time if known is None else max(known, time)


def _replace_last(state: JobState, incident: IncidentView) -> JobState:
    return state.changed(incidents=(*state.incidents[:-1], incident))
