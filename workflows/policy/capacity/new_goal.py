"""Takes in that a user has changed `scaling` while the job runs: another policy, goal or limit.

The change is one of the specification, which the run carries on. What was measured counts for the new goal, too, so the
job chooses by it at once; only what was made of the old goal is forgotten.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from perdure.contract import Evidence, EvidenceSource
from perdure.contract.base import shorten
from perdure.spec.durations import format_duration
from perdure.spec.job import JobSpec
from perdure.spec.scaling import Scaling, ScalingPolicy
from perdure.workflows.policy.capacity import scaling
from perdure.workflows.policy.facts.events import ScalingChanged
from perdure.workflows.policy.record import observations
from perdure.workflows.policy.state.job import RoleInJob


def difference(before: Scaling, after: Scaling) -> str:
    """Returns the fields that differ, for users: `policy deadline instead of efficient`; empty where none does."""
    old, new = dict(before), dict(after)
    return ", ".join(
        f"{name} {_text(new[name])} instead of {_text(old[name])}" for name in new if new[name] != old[name]
    )


def follow(state: RoleInJob, event: ScalingChanged, job: JobSpec, now: datetime) -> RoleInJob:
    """Forgets what was made of the old goal, and records the new one.

    Args:
        state: The role.
        event: The change.
        job: The specification with the new `scaling`.
        now: The time.
    """
    chosen, known = job.roles[state.role].scaling, state.scaling
    # A series of tries may begin at once, and the choice for the old goal delays none for the new one.
    known = known.replace(tries=0, began_at=None, problem="", advised=None, goal_at=now)
    because = f": {event.reason}" if event.reason else ""
    title = shorten(f"a user has changed scaling{because}: {event.change}")
    if chosen.policy is ScalingPolicy.MAX and not chosen.share:
        most = scaling.largest_of(state)
        added = dict.fromkeys(range(state.nodes_max, most), title)
        state = state.replace(nodes_max=most, ready_since=None, request_reasons=state.request_reasons | added)
        known = known.replace(largest=None, awaited_since=None, missed=None)
    evidence = Evidence(time=now, source=EvidenceSource.USER, text=title)
    return observations.observe_new_goal(state.replace(scaling=known), title, evidence, now)


def _text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case datetime():
            return f"{value:%Y-%m-%d %H:%M:%S %Z}"
        case timedelta():
            return format_duration(value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)
