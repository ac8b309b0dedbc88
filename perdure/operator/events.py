"""Kubernetes Events about objects: what `kubectl describe` and `kubectl events` show of a job's life.

An Event is written when the status changes in a way that people should notice. Events with the same text are one, with
a count, and of many that differ the later ones are one, too, as Kubernetes' own components have it.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.base.kubernetes import TRANSIENT, KubernetesApi, core_path
from perdure.base.kubernetes_errors import KubernetesError
from perdure.base.words import count
from perdure.contract import JobPhase
from perdure.operator.resource import GROUP, KIND, VERSION, Metadata, TrainingJobResource
from perdure.operator.status import ADOPTED, REFUSED, ResourceStatus, Truth

logger = logging.getLogger("perdure.operator")

_COMPONENT = "perdure-operator"
_LONGEST = 1024
"""The most bytes of an Event's message that the API server accepts."""

WINDOW = timedelta(minutes=10)
MOST_TEXTS = 10
"""Texts of one reason within WINDOW that are Events of their own, as client-go's EventAggregator has it."""
COMBINED = "(combined from similar events): "
"""The beginning of the one Event for all texts beyond these, as client-go writes it."""
_MOST_KNOWN = 4096
"""Reasons of objects whose recent texts are remembered."""

_PHASES = (JobPhase.WAITING, JobPhase.RECOVERING, JobPhase.HELD)
"""Phases that are Events with their own reason and the job's words."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The object that an Event is about."""

    api_version: str
    kind: str
    metadata: Metadata

    def __str__(self) -> str:
        return f"{self.kind} {self.metadata.namespace}/{self.metadata.name}"


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """Something that happened to a job."""

    reason: str
    """What happened, in one word."""
    message: str
    warning: bool = False

    def digest(self, uid: str) -> str:
        """Returns what is the same for this text about the same object only."""
        return hashlib.sha256(f"{uid}\n{self.reason}\n{self.message}".encode()).hexdigest()[:16]


class RecentTexts:
    """Bounds the Events of an object whose texts all differ.

    It is kept in memory: an operator that restarts counts from zero.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], dict[str, datetime]] = OrderedDict()

    def has_room(self, uid: str, one: Occurrence, now: datetime) -> bool:
        """Takes in a text; returns whether it is an Event of its own, rather than part of the combined one."""
        key = (uid, one.reason)
        texts = {text: seen for text, seen in self._known.pop(key, {}).items() if now - seen < WINDOW}
        text = one.digest(uid)
        room = text in texts or len(texts) < MOST_TEXTS
        self._known[key] = {**texts, text: now} if room else texts
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return room


def occurrences(before: ResourceStatus, after: ResourceStatus) -> tuple[Occurrence, ...]:
    """Returns what happened between two statuses of an object, in order."""
    found: list[Occurrence] = []
    accepted = after.condition("Accepted")
    if (
        accepted
        and accepted.status is Truth.FALSE
        and _reason_and_message(before, "Accepted") != _reason_and_message(after, "Accepted")
    ):
        found.append(Occurrence(reason="Refused", message=f"{accepted.reason}: {accepted.message}", warning=True))
    for kind in ("Accepted", "Running"):
        doubt = after.condition(kind)
        if doubt and doubt.status is Truth.UNKNOWN and _reason_and_message(before, kind)[0] != doubt.reason:
            found.append(Occurrence(reason=doubt.reason, message=doubt.message, warning=True))
    if after.run_id and not before.run_id:
        if accepted and accepted.reason == ADOPTED:
            message = (
                f"The workflow {after.workflow_id}, run {after.run_id}, which an earlier object started, continues"
            )
            found.append(Occurrence(reason=ADOPTED, message=message))
        else:
            message = f"The workflow {after.workflow_id} was started, run {after.run_id}"
            found.append(Occurrence(reason="Submitted", message=message))
    if _holds(after, "Kept") and not _holds(before, "Kept"):
        found.append(Occurrence(reason="Kept", message=_reason_and_message(after, "Kept")[1], warning=True))
    if after.last_incident and _number(before.last_incident) != _number(after.last_incident):
        found.append(Occurrence(reason="Incident", message=after.last_incident, warning=True))
    found.extend(
        Occurrence(reason=kind, message=_reason_and_message(after, kind)[1], warning=True)
        for kind in ("NodesRefused", "StepsStalled")
        if _holds(after, kind) and not _holds(before, kind)
    )
    if after.phase in _PHASES and before.phase != after.phase:
        message = _reason_and_message(after, "Running")[1]
        found.append(Occurrence(reason=after.phase.capitalize(), message=message, warning=True))
    if _holds(after, "Running") and not _holds(before, "Running"):
        nodes = f"{after.nodes} node" + ("" if after.nodes.endswith("/1") else "s")
        message = f"All members of the world step: {nodes}, {count(after.world_size or 0, 'rank')}"
        found.append(Occurrence(reason="Running", message=message))
    if after.phase == JobPhase.SUSPENDED and before.phase != after.phase:
        found.append(Occurrence(reason="Suspended", message="The job has no nodes until spec.suspend is false"))
    if after.finished and not before.finished and after.phase != REFUSED:
        failed = after.condition("Failed")
        message = (
            failed.message if failed else f"The command has ended with 0 on all nodes; restarts: {after.restarts or 0}"
        )
        found.append(Occurrence(reason=after.phase.capitalize(), message=message, warning=failed is not None))
    return tuple(found)


class Events:
    """Writes Events at the API server."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._recent = RecentTexts()

    async def record(self, resource: TrainingJobResource, before: ResourceStatus, after: ResourceStatus) -> None:
        """Writes what happened between two statuses of an object."""
        subject = Subject(api_version=f"{GROUP}/{VERSION}", kind=KIND, metadata=resource.metadata)
        for one in occurrences(before, after):
            await self.write(subject, one)

    async def write(self, subject: Subject, one: Occurrence) -> None:
        """Writes an Event; one that cannot be written is logged alone."""
        try:
            await self._write(subject, one)
        except (KubernetesError, *TRANSIENT) as error:
            logger.warning("%s: the Event %s is not written: %s", subject, one.reason, error)

    async def _write(self, subject: Subject, one: Occurrence) -> None:
        metadata, time = subject.metadata, datetime.now(UTC).replace(microsecond=0)
        now, named = time.isoformat(), one
        if not self._recent.has_room(metadata.uid, one, time):
            named, one = replace(one, message=COMBINED), replace(one, message=COMBINED + one.message)
        name = f"{metadata.name}.{named.digest(metadata.uid)}"
        path = core_path(metadata.namespace, "events")
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata.namespace},
            "involvedObject": {
                "apiVersion": subject.api_version,
                "kind": subject.kind,
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
            },
            "type": "Warning" if one.warning else "Normal",
            "reason": one.reason,
            "message": one.message.encode()[:_LONGEST].decode(errors="ignore"),
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "reportingInstance": socket.gethostname(),
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(path, event)
        except KubernetesError as error:
            if error.reason != "AlreadyExists":
                raise
            found = await self._api.get(f"{path}/{name}") or {}
            again = {"count": found.get("count", 0) + 1, "lastTimestamp": now, "message": event["message"]}
            await self._api.patch(f"{path}/{name}", again)


def _reason_and_message(status: ResourceStatus, kind: str) -> tuple[str, str]:
    condition = status.condition(kind)
    return (condition.reason, condition.message) if condition else ("", "")


def _holds(status: ResourceStatus, kind: str) -> bool:
    condition = status.condition(kind)
    return condition is not None and condition.status is Truth.TRUE


def _number(incident: str) -> str:
    return incident.partition(" ")[0]
