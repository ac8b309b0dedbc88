"""The metrics of jobs that a worker exports: what its decisions changed, and the open jobs that the server lists."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from temporalio.client import Client
from temporalio.common import SearchAttributeKey

from perdure.base.executions import OPEN, Execution, list_executions
from perdure.base.metrics.samples import Sample
from perdure.base.metrics.series import MOST_SERIES, ZERO_FOR, CurrentSamples, Series, text_of
from perdure.base.metrics.table import BOTH, WORKER_METRICS
from perdure.contract import IncidentView, JobPhase
from perdure.contract.names import TRAINING_JOB, job_of
from perdure.workflows.policy.record.job_events import JobEvent
from perdure.workflows.policy.services.dataset_views import samples_done
from perdure.workflows.policy.services.datasets import DatasetState
from perdure.workflows.policy.services.spans import size
from perdure.workflows.policy.state.job import JobState
from perdure.workflows.policy.state.role import RoleState
from perdure.workflows.search_attributes import JOB_BACKEND, JOB_PHASE, WORLD_SIZE

logger = logging.getLogger(__name__)

_LISTED_EVERY: Final = 10.0
"""Seconds for which a listing is used: scrapes in between cost the server nothing."""
_LISTED_WITHIN: Final = timedelta(seconds=5)
"""Time for one listing; a scrape must not wait for a server that is away."""
_KEPT: Final = 600.0
"""Seconds for which the series of a closed job are kept, so that its last samples are scraped."""
_REQUESTED: Final = "REQUESTED"


class JobMetrics:
    """The metrics of jobs in one worker.

    What only grows is exported by the worker that decided it, and Prometheus adds it up over workers. What goes up and
    down is listed by the server, so that it is right no matter which worker decides a job, or whether any does.
    """

    def __init__(self, client: Client, *, zero_for: timedelta = ZERO_FOR) -> None:
        """Creates the object.

        Args:
            client: A client of the namespace that the worker serves.
            zero_for: As in `Series`.
        """
        self._client = client
        self.series = Series((*WORKER_METRICS, *BOTH), zero_for=zero_for)
        self._listed: Sequence[Sample] = ()
        self._listed_at = -math.inf
        self._seen: dict[tuple[str, str], float] = {}
        """When each job with series of its own was last open, or changed."""

    def on_event(self, job: JobState, event: JobEvent) -> None:
        """Takes in an event of a job."""
        of_role = {**self._labels(job.namespace, job.name), "role": event.role}
        match event.name:
            case "world":
                self.series.set("perdure_job_generation", job.roles[event.role].generation, **of_role)
            case "restart":
                incident = job.view(event.role).last_incident
                self.series.count("perdure_job_restarts_total", **of_role, cause=_cause(incident))
            case "relaunch":
                self.series.count("perdure_job_relaunches_total", **of_role)
            case "incident" if event.type == "end":
                number = event.attributes["number"]
                for incident in job.incidents:
                    if incident.number == number:
                        self._on_incident_end(incident)
            case "checkpoint":
                self._on_checkpoint(job.roles[event.role], of_role)
            case "outcome" if job.outcome is not None:
                phase = job.outcome.phase.value
                self.series.count("perdure_jobs_ended_total", job_namespace=job.namespace, phase=phase)
            case _:
                pass

    def on_dataset(self, job_id: str, name: str, state: DatasetState) -> None:
        """Takes in the progress of a dataset."""
        labels = self._labels(*job_of(job_id))
        done = samples_done(state)
        self.series.set("perdure_dataset_samples_done", done, **labels, dataset=name)
        self.series.set("perdure_dataset_samples_set_aside", size(state.aside), **labels, dataset=name)
        if state.parameters.end is not None:
            left = max(state.parameters.end - done, 0)
            self.series.set("perdure_dataset_samples_left", left, **labels, dataset=name)

    async def text(self) -> bytes:
        """Returns all metrics of jobs in Prometheus' text format."""
        now = time.monotonic()
        if now - self._listed_at >= _LISTED_EVERY:
            self._listed_at = now
            await self._list(now)
        listed = self._listed
        return text_of(self.series, CurrentSamples(lambda: listed))

    def _labels(self, namespace: str, name: str) -> dict[str, str]:
        # Called by workflows, whose event loop has a clock of its own.
        self._seen[(namespace, name)] = time.monotonic()
        return {"job_namespace": namespace, "job_name": name}

    def _on_incident_end(self, incident: IncidentView) -> None:
        cause = _cause(incident)
        notice = (incident.noticed_at - incident.started_at).total_seconds()
        self.series.observe("perdure_job_notice_seconds", notice, cause=cause)
        again = incident.stepping_at or incident.running_at
        if again is not None:
            repair = (again - incident.noticed_at).total_seconds()
            self.series.observe("perdure_job_repair_seconds", repair, cause=cause)

    def _on_checkpoint(self, role: RoleState, labels: dict[str, str]) -> None:
        durable = role.checkpoints.durable
        if durable is not None:
            self.series.set("perdure_job_checkpoint_step", durable.checkpoint.step, **labels)
            self.series.set("perdure_job_checkpoint_time_seconds", durable.committed_at.timestamp(), **labels)
            self.series.set("perdure_job_checkpoint_write_seconds", durable.took.total_seconds(), **labels)

    async def _list(self, now: float) -> None:
        query = f"WorkflowType = '{TRAINING_JOB}' AND {OPEN}"
        try:
            async with asyncio.timeout(_LISTED_WITHIN.total_seconds()):
                jobs = [job async for job in list_executions(self._client, query, limit=MOST_SERIES)]
        except Exception as error:
            logger.warning("open jobs cannot be listed for metrics: %s", error or type(error).__name__)
            self.series.count("perdure_listing_failures_total")
            self._listed = ()
            return
        self._listed = [sample for job in jobs for sample in _of_job(job)] + _numbers(jobs)
        for job in jobs:
            if job_of(job.id) in self._seen:
                self._seen[job_of(job.id)] = now
        for (namespace, name), at in list(self._seen.items()):
            if now - at > _KEPT:
                del self._seen[(namespace, name)]
                self.series.remove(job_namespace=namespace, job_name=name)


def _cause(incident: IncidentView | None) -> str:
    if incident is None:
        return JobPhase.UNKNOWN.value
    return incident.failure.value if incident.failure is not None else _REQUESTED


def _of_job(job: Execution) -> Sequence[Sample]:
    namespace, name = job_of(job.id)
    labels = {"job_namespace": namespace, "job_name": name}
    size = job.search_attributes.get(WORLD_SIZE)
    return (
        Sample("perdure_job_phase", 1, {**labels, "phase": _attribute(job, JOB_PHASE)}),
        *([Sample("perdure_job_world_size", size, labels)] if size is not None else []),
    )


def _numbers(jobs: Sequence[Execution]) -> list[Sample]:
    counts = Counter((job_of(job.id)[0], _attribute(job, JOB_BACKEND), _attribute(job, JOB_PHASE)) for job in jobs)
    return [
        Sample("perdure_jobs", count, {"job_namespace": namespace, "backend": backend, "phase": phase})
        for (namespace, backend, phase), count in counts.items()
    ]


def _attribute(job: Execution, key: SearchAttributeKey[str]) -> str:
    """Returns a search attribute, which servers do not have where they could not be registered."""
    return job.search_attributes.get(key) or JobPhase.UNKNOWN.value
