"""The first span of each incident's trace, and its parts, as the job knows them when the incident is over."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

from perdure.base.tracing.interceptor import incident_ids
from perdure.base.tracing.provider import Tracing
from perdure.contract import IncidentView
from perdure.contract.names import job_workflow_id
from perdure.workflows.policy.record.job_events import JobEvent
from perdure.workflows.policy.state.job import JobState


class JobSpans:
    """Makes the spans of the jobs that a worker decides."""

    def __init__(self, tracing: Tracing) -> None:
        """Creates the object.

        Args:
            tracing: Makes the spans.
        """
        self._tracing = tracing

    def on_event(self, job: JobState, event: JobEvent) -> None:
        """Takes an event of a job; a sink of `perdure.workflows.event_sink`."""
        if event.name != "incident" or event.type != "end" or event.span is None:
            return
        number = event.attributes["number"]
        incident = next(one for one in job.incidents if one.number == number)
        assert incident.over_at is not None
        ids = incident_ids(job_workflow_id(job.namespace, job.name), event.span)
        attributes = {
            "perdure.job": f"{job.namespace}/{job.name}",
            "perdure.job.uid": job.uid,
            "perdure.role": incident.role,
            "perdure.incident": number,
            "title": incident.title,
            "culprit": incident.culprit,
            "rule": incident.rule,
            "action": incident.action,
            "generation_before": incident.generation_before,
            "generation_after": incident.generation_after,
        }
        cause = incident.failure.value if incident.failure else "REQUESTED"
        failed = "" if incident.stepping_at or incident.running_at else "the job did not run again after it"
        self._tracing.first(f"incident {cause}", ids, incident.started_at, incident.over_at, attributes, failed)
        for name, began, ended in parts_of(incident):
            self._tracing.below(name, ids.context, began, ended, {})


def parts_of(incident: IncidentView) -> list[tuple[str, datetime, datetime]]:
    """Returns name, begin and end of the parts of an incident whose times are known; clocks of several machines may
    disagree."""
    times = (
        ("", incident.started_at),
        ("notice", incident.noticed_at),
        ("decide", incident.decided_at),
        ("command", incident.commanded_at),
        ("enter", incident.entered_at),
        ("step", incident.stepping_at or incident.running_at),
    )
    known = [(name, time) for name, time in times if time is not None]
    return [(name, began, ended) for (_, began), (name, ended) in pairwise(known) if began <= ended]
