"""Decides on all events that a job has received since its last decision; where that fails, on each event alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from perdure.contract import NodeTransition
from perdure.spec.job import JobSpec
from perdure.workflows.policy.facts.events import Event, TimePassed
from perdure.workflows.policy.job import TokenSource, apply_event, decide
from perdure.workflows.policy.state.job import JobState

_LAST_DROPPED = 300


def decide_all(
    state: JobState,
    events: Sequence[Event],
    job: JobSpec,
    now: datetime,
    *,
    new_token: TokenSource,
    dropped: Callable[[str], None],
) -> JobState:
    """Returns the state of the job after all events.

    An event that cannot be decided on, because it is malformed or this release has a defect, is left out and counted:
    one message must not stop a job. If the job cannot decide even without it, the error is raised: the workflow task
    fails, nothing is lost, and a release that can decide takes all events.

    Args:
        state: The job before the events.
        events: The events, in the order in which they arrived.
        job: The job's specification.
        now: The time of the decision.
        new_token: Makes the secrets of new incarnations.
        dropped: Is called with a description of each event that is left out.
    """
    try:
        known = state
        for event in events:
            if isinstance(event, NodeTransition):
                # One decision looks at every node, and a thousand nodes report at once. Nodes that are lost at once are
                # one incident.
                known = apply_event(known, event, job, now)
            else:
                known = decide(known, event, job, now, new_token=new_token)
        return decide(known, TimePassed(), job, now, new_token=new_token)
    except Exception:
        for event in events:
            try:
                state = decide(state, event, job, now, new_token=new_token)
            except Exception as error:
                what = f"{type(event).__name__}: {type(error).__name__}: {error}"[:_LAST_DROPPED]
                dropped(what)
                state = state.replace(dropped_events=state.dropped_events + 1, last_dropped=what)
        return decide(state, TimePassed(), job, now, new_token=new_token)
