"""Where the events of jobs go, which the process of a worker sets: by default nowhere.

No decision depends on it. Events are sent by the code that decides, and not by an activity: they need no place in the
history, and a worker that dies may lose the last ones or send them again.
"""

from __future__ import annotations

from collections.abc import Callable

from workflows.policy.job_events import JobEvent, events_between
from workflows.policy.state import JobState

Sink = Callable[[JobState, JobEvent], None]
"""Takes a job and one of its events. It must not wait."""


class _Sinks:
    current: Sink | None = None


def set_sink(sink: Sink | None) -> None:
    """Sets the destination of all jobs' events in this process."""
    _Sinks.current = sink


def send_events(before: JobState, after: JobState) -> None:
    """Sends what a decision changed; never raises."""
    sink = _Sinks.current
    if sink is None or after is before:
        return
    try:
        for event in events_between(before, after):
            sink(after, event)
    except Exception:
        # The job continues without its events; a task that fails for them would stop it.
        _Sinks.current = None
