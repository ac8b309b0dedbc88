"""What a decision changed, as events of the job: for logs and programs, and for no decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from perdure.contract import IncidentView, World
from perdure.workflows.policy.state.job import JobState, RoleInJob


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One event. Its name is a method of `perdure.events.JobEvents`."""

    name: str
    role: str = ""
    """The role that it is about; of an event of the whole job, the role that leads it."""
    type: Literal["begin", "end", "instant"] = "instant"
    span: str | None = None
    """What begin and end have in common."""
    time: datetime | None = None
    """When it happened; None for the time of the decision."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


def events_between(before: JobState, after: JobState, now: datetime) -> Iterator[JobEvent]:
    """Returns the events of a job whose state was `before`, and is `after` since `now`."""
    roles = [(before.view(role), after.view(role)) for role in after.roles]
    for one, then in roles:
        yield from _of_role(then, _of_endings(one, then, now))
    leading = after.leading.role
    yield from (replace(event, role=event.role or leading) for event in _of_job(before, after))
    for one, then in roles:
        yield from _of_role(then, _of_changes(one, then, now))
    yield from (replace(event, role=leading) for event in _of_end(before, after))


def _of_role(after: RoleInJob, events: Iterable[JobEvent]) -> Iterator[JobEvent]:
    return (replace(event, role=after.role) for event in events)


def _of_job(before: JobState, after: JobState) -> Iterator[JobEvent]:
    if after.incidents is not before.incidents:
        yield from _of_incidents(before, after)


def _of_changes(before: RoleInJob, after: RoleInJob, now: datetime) -> Iterator[JobEvent]:
    if after.restarts and after.restarts[-1:] != before.restarts[-1:]:
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
        yield from _of_beginning(after, world, now)
    durable = after.checkpoints.durable
    if durable is not None and durable != before.checkpoints.durable:
        attributes = {"step": durable.checkpoint.step, "size": durable.size, "duration_s": durable.took.total_seconds()}
        yield JobEvent(name="checkpoint", time=durable.committed_at, attributes=attributes)


def _of_end(before: JobState, after: JobState) -> Iterator[JobEvent]:
    if after.unprocessed is not before.unprocessed:
        yield from _of_datasets(before, after)
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


def _of_beginning(after: RoleInJob, world: World, now: datetime) -> Iterator[JobEvent]:
    attributes = {"world_generation": world.generation, "nodes": world.nodes, "world_size": world.processes}
    span, time = _rendezvous_of(after, world), after.world_decided_at
    yield JobEvent(name="rendezvous", type="begin", span=span, time=time, attributes=attributes)
    if _entering(after) is None:
        yield _rendezvous_end(after, after, world, now)


def _of_endings(before: RoleInJob, after: RoleInJob, now: datetime) -> Iterator[JobEvent]:
    """What ended with the world of `before`, or with its beginning."""
    entering, training = _entering(before), _training(before)
    if entering is not None and _entering(after) != entering:
        yield _rendezvous_end(before, after, entering, now)
    if training is not None and after.complete_generation < training.generation and not _continues(training, after):
        attributes = {"world_generation": training.generation, **_reason_of_end(training, after)}
        yield JobEvent(name="abort", attributes=attributes)


def _rendezvous_end(before: RoleInJob, after: RoleInJob, world: World, now: datetime) -> JobEvent:
    decided = before.world_decided_at or now
    formed = after.world == world and _has_entered(after, world)
    attributes: dict[str, Any] = {
        "world_generation": world.generation,
        "nodes": world.nodes,
        "world_size": world.processes,
        "duration_s": max((now - decided).total_seconds(), 0.0),
        "success": formed,
    }
    if not formed:
        attributes["error"] = _reason_of_end(world, after)["reason"]
    return JobEvent(name="rendezvous", type="end", span=_rendezvous_of(before, world), time=now, attributes=attributes)


def _rendezvous_of(job: RoleInJob, world: World) -> str:
    return f"{job.uid}-{job.role}-rendezvous-{world.generation}"


def _training(job: RoleInJob) -> World | None:
    """The world that exists, and that nothing has ended; its ranks may not have entered it yet."""
    world = job.world
    over = job.interruption is not None or job.outcome is not None
    return None if world is None or over or job.complete_generation >= world.generation else world


def _entering(job: RoleInJob) -> World | None:
    """The world that exists, and that not all of its nodes have entered."""
    world = _training(job)
    return None if world is None or _has_entered(job, world) else world


def _has_entered(job: RoleInJob, world: World) -> bool:
    members = (job.nodes.get(rank) for rank in world.members)
    return all(
        node is not None and max(node.entered, node.stepping, node.finished) >= world.generation for node in members
    )


def _continues(world: World, after: RoleInJob) -> bool:
    training = _training(after)
    return training is not None and training.generation == world.generation


def _reason_of_end(world: World, after: RoleInJob) -> dict[str, Any]:
    """Why a world is over, as the job's newest incident or its outcome tells."""
    incident = after.last_incident
    if incident is not None and incident.generation_before == world.generation:
        return {"reason": incident.title, "incident": incident.number}
    if after.outcome is not None:
        return {"reason": after.outcome.reason}
    if after.complete_generation >= world.generation:
        return {"reason": "its ranks are done"}
    return {"reason": after.reason or "another world follows"}


def _of_datasets(before: JobState, after: JobState) -> Iterator[JobEvent]:
    for name, aside in after.unprocessed.items():
        known = before.unprocessed.get(name)
        if known is None or aside.samples > known.samples:
            shards = [one.summary for one in aside.shards if known is None or one not in known.shards]
            attributes = {"dataset": name, "samples": aside.samples, "shards": shards}
            yield JobEvent(name="shards_set_aside", attributes=attributes)


def _of_incidents(before: JobState, after: JobState) -> Iterator[JobEvent]:
    known = {incident.number: incident for incident in before.incidents}
    for incident in after.incidents:
        earlier = known.get(incident.number)
        if earlier is incident:
            continue
        if incident.observation is not None:
            if earlier is None:
                attributes = {"number": incident.number, "title": incident.title}
                yield JobEvent(name="observation", role=incident.role, time=incident.started_at, attributes=attributes)
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
    return JobEvent(
        name="incident",
        role=incident.role,
        type=type,
        span=f"{job.uid}-{incident.number}",
        time=time,
        attributes=attributes,
    )
