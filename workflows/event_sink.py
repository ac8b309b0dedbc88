"""Where the events of jobs and the progress of datasets go, which the process of a worker sets: by default nowhere.

No decision depends on it. They are sent by the code that decides, and not by an activity: they need no place in the
history, and a worker that dies may lose the last ones or send them again.

A sink that raises loses that event only: each sink gets each event of each job by itself, and the next one as usual.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from perdure.workflows.policy.record.job_events import JobEvent, events_between
from perdure.workflows.policy.services.datasets import DatasetState
from perdure.workflows.policy.state.job import JobState

logger = logging.getLogger(__name__)

Sink = Callable[[JobState, JobEvent], None]
"""Takes a job and one of its events. It must not wait."""

DatasetSink = Callable[[str, str, DatasetState], None]
"""Takes the workflow ID of a job, the name of one of its datasets, and its state. It must not wait."""

LOG_INTERVAL: Final = 60.0
"""Seconds between two log lines about one job's events: a dataset makes progress many times a second."""


class _Sinks:
    jobs: tuple[Sink, ...] = ()
    datasets: DatasetSink | None = None
    failures: Final[dict[str, float]] = {}
    """When failures of each job were logged last."""


def set_sinks(*sinks: Sink) -> None:
    """Sets the destinations of all jobs' events in this process."""
    _Sinks.jobs = sinks
    _Sinks.failures.clear()


def set_dataset_sink(sink: DatasetSink | None) -> None:
    """Sets the destination of all datasets' progress in this process."""
    _Sinks.datasets = sink
    _Sinks.failures.clear()


def send_events(before: JobState, after: JobState, now: datetime) -> None:
    """Sends what a decision changed; never raises."""
    if not _Sinks.jobs or after is before:
        return
    job = f"{after.namespace}/{after.name}"
    events: list[JobEvent] = []
    with _failures_logged(job, "events of a decision are lost"):
        events = list(events_between(before, after, now))
    for event in events:
        for sink in _Sinks.jobs:
            with _failures_logged(job, f"its event {event.name} is lost for one of the sinks"):
                sink(after, event)


def send_dataset(job_id: str, name: str, state: DatasetState) -> None:
    """Sends the progress of a dataset; never raises."""
    if _Sinks.datasets is None:
        return
    with _failures_logged(job_id, f"the progress of its dataset {name} is not exported"):
        _Sinks.datasets(job_id, name, state)


@contextmanager
def _failures_logged(job: str, consequence: str) -> Generator[None]:
    """Logs errors that are raised inside, and drops them: a workflow task that fails for them would stop the job."""
    try:
        yield
    except Exception:
        now = time.monotonic()
        # Several workflows run at a time, each in a thread.
        for known, at in list(_Sinks.failures.items()):
            if now - at >= LOG_INTERVAL:
                _Sinks.failures.pop(known, None)
        if job not in _Sinks.failures:
            _Sinks.failures[job] = now
            logger.exception("%s: %s; the job continues, and the next event is sent as usual", job, consequence)
