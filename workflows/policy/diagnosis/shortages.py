"""A Temporal server that lacks capacity: it refuses agents their leases and commands, and hands them to no one.

That is a state of the control plane, and nobody's failure. While it lasts, silence of an agent says nothing about its
node: no node is given up for it, and no wait for nodes ends.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.base.shortages import remedy
from perdure.contract.transitions import NodePollsRefused
from perdure.workflows.policy.state.job import JobFacts, JobState, RoleInJob, Shortage
from perdure.workflows.policy.state.node import NodeState

LASTS = timedelta(seconds=90)
"""The time after a report of a shortage within which an agent reports it again, or polls successfully: it repeats the
report every 30 s, and the SDK's pauses between refused polls grow to 10 s."""

_REFUSED = "the Temporal server refuses polls of agents"


def on_polls_refused(state: RoleInJob, node: NodeState, refused: NodePollsRefused, now: datetime) -> RoleInJob:
    """Takes in that the server refuses the polls of this node's agent."""
    since = state.shortage.since if state.shortage is not None else min(refused.time, now)
    state = state.replace(shortage=Shortage(cause=refused.cause, since=since, until=now + LASTS))
    if node.reachable or _REFUSED in node.reason:
        return state
    return state.with_node(node.replace(reason=worded(state, node.reason)))


def end_when_due(state: JobState, now: datetime) -> JobState:
    """Ends a shortage that no agent has reported of late."""
    return state.replace(shortage=None) if state.shortage is not None and now >= state.shortage.until else state


def excused_until(state: RoleInJob) -> datetime | None:
    """The time until which silence of agents says nothing about their nodes; None where it does now."""
    shortage = state.shortage.until if state.shortage is not None else None
    return max((time for time in (state.control_lag_until, shortage) if time is not None), default=None)


def worded(state: JobFacts, reason: str) -> str:
    """Why an agent is silent, with the shortage that may be the cause."""
    return f"{reason}; {_REFUSED} ({state.shortage.cause})" if state.shortage is not None else reason


def describe(state: JobFacts) -> str:
    """The shortage as a warning with its remedy; empty where there is none."""
    if (shortage := state.shortage) is None:
        return ""
    return (
        f"{_REFUSED} since {shortage.since:%Y-%m-%d %H:%M:%S} UTC ({shortage.cause}): they get leases and commands "
        f"late, and no node is given up for its silence. Remedy: {remedy(shortage.cause)}"
    )


def next_action(state: JobFacts) -> str:
    """What a job in a shortage waits for; empty where there is none."""
    return (
        "waits until the Temporal server has enough capacity; replaces no node for its silence"
        if state.shortage
        else ""
    )
