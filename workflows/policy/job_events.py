"""What a decision changed, as events of the job: for logs and programs, and for no decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from workflows.messages import IncidentView
from workflows.policy.state import JobState


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One event. Its name is a method of `perdure.events.JobEvents`."""

    name: str
    type: Literal["begin", "end", "instant"] = "instant"
    span: str | None = None
    """What begin and end have in common."""
    time: datetime | None = None
    """When it happened; None for the time of the decision."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


def events_between(before: JobState, after: JobState) -> Iterator[JobEvent]:
    """Returns the events of a job whose state was `before`, and is `after`."""
    if after.incidents is not before.incidents:
        yield from _of_incidents(before, after)
    if after.restart_count > before.restart_count:
        yield JobEvent(name="restart", attributes={"restarts": after.restart_count})
    if after.nodes is not before.nodes:
        for rank, node in after.nodes.items():
            known = before.nodes.get(rank)
            if known is not None and node.incarnation > known.incarnation:
                yield JobEvent(name="relaunch", attributes={"node": rank, "incarnation": node.incarnation})
    world = after.world
    if world is not None and (before.world is None or world.generation > before.world.generation):
        attributes = {"world_generation": world.generation, "nodes": world.nodes, "world_size": world.processes}
        yield JobEvent(name="world", attributes=attributes)
    durable = after.checkpoints.durable
    if durable is not None and durable != before.checkpoints.durable:
        attributes = {"step": durable.step, "size": durable.size, "duration_s": durable.took.total_seconds()}
        yield JobEvent(name="checkpoint", time=durable.committed_at, attributes=attributes)
    if after.phase is not before.phase:
        attributes = {"phase": after.phase.value, "before": before.phase.value, "reason": after.reason}
        yield JobEvent(name="phase", attributes=attributes)
    if after.outcome is not None and before.outcome is None:
        attributes = {
            "phase": after.outcome.phase.value,
            "exit_code": after.outcome.exit_code,
            "reason": after.outcome.reason,
        }
        yield JobEvent(name="outcome", time=after.outcome.decided_at, attributes=attributes)


def _of_incidents(before: JobState, after: JobState) -> Iterator[JobEvent]:
    known = {incident.number: incident for incident in before.incidents}
    for incident in after.incidents:
        earlier = known.get(incident.number)
        if earlier is incident:
            continue
        if incident.observation is not None:
            if earlier is None:
                attributes = {"number": incident.number, "title": incident.title}
                yield JobEvent(name="observation", time=incident.started_at, attributes=attributes)
            continue
        if earlier is None:
            yield _part(after, incident, "begin", incident.started_at)
        if incident.over_at is not None and (earlier is None or earlier.over_at is None):
            yield _part(after, incident, "end", incident.over_at)


def _part(job: JobState, incident: IncidentView, type: Literal["begin", "end"], time: datetime) -> JobEvent:
    attributes: dict[str, Any] = {
        "number": incident.number,
        "title": incident.title,
        "failure": incident.failure and incident.failure.value,
        "culprit": incident.culprit,
    }
    if type == "end":
        attributes |= {
            "duration_s": (time - incident.started_at).total_seconds(),
            "success": incident.stepping_at is not None or incident.running_at is not None,
            "rule": incident.rule,
            "action": incident.action,
        }
    return JobEvent(name="incident", type=type, span=f"{job.uid}-{incident.number}", time=time, attributes=attributes)
