"""Where the events of jobs and the progress of datasets go, which the process of a worker sets: by default nowhere.

No decision depends on it. They are sent by the code that decides, and not by an activity: they need no place in the
history, and a worker that dies may lose the last ones or send them again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from workflows.policy.datasets import DatasetState
from workflows.policy.job_events import JobEvent, events_between
from workflows.policy.state import JobState

Sink = Callable[[JobState, JobEvent], None]
"""Takes a job and one of its events. It must not wait."""

DatasetSink = Callable[[str, str, DatasetState], None]
"""Takes the workflow ID of a job, the name of one of its datasets, and its state. It must not wait."""


class _Sinks:
    current: Sink | None = None
    datasets: DatasetSink | None = None


def set_sink(sink: Sink | None) -> None:
    """Sets the destination of all jobs' events in this process."""
    _Sinks.current = sink


def set_dataset_sink(sink: DatasetSink | None) -> None:
    """Sets the destination of all datasets' progress in this process."""
    _Sinks.datasets = sink


def send_events(before: JobState, after: JobState, now: datetime) -> None:
    """Sends what a decision changed; never raises."""
    sink = _Sinks.current
    if sink is None or after is before:
        return
    try:
        for event in events_between(before, after, now):
            sink(after, event)
    except Exception:
        # The job continues without its events; a task that fails for them would stop it.
        _Sinks.current = None


def send_dataset(job_id: str, name: str, state: DatasetState) -> None:
    """Sends the progress of a dataset; never raises."""
    sink = _Sinks.datasets
    if sink is None:
        return
    try:
        sink(job_id, name, state)
    except Exception:
        _Sinks.datasets = None
