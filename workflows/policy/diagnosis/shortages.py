"""A Temporal server that lacks capacity: it refuses agents their leases and commands, and hands them to no one.

That is a state of the control plane, and nobody's failure. The silence of an agent that reports it says nothing about
its node: the node is not given up for it, and no wait for the node ends. Agents that cannot even report it are silent
only if the whole server is short, and then it refuses others, too: so the silence of an agent without a report is
excused as well while at least half of those that report to the job are refused. One refused agent among many that poll
does not excuse the silence of a dead machine.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.base.shortages import remedy
from perdure.contract import NodePhase
from perdure.contract.transitions import NodePollsRefused
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.state.job import JobFacts, JobState, RoleInJob, Shortage
from perdure.workflows.policy.state.node import NodeState

LONGEST = timedelta(minutes=10)
"""The longest time for which a report counts, whatever an agent says."""

_REFUSED = "the Temporal server refuses polls of agents"
_REPORT = (NodePhase.JOINED, NodePhase.READY)
"""Phases of nodes whose agents have reported."""


def on_polls_refused(state: RoleInJob, node: NodeState, refused: NodePollsRefused, now: datetime) -> RoleInJob:
    """Takes in that the server refuses the polls of this node's agent."""
    until = now + min(refused.lasts, LONGEST)
    shortage = state.shortage or Shortage(cause=refused.cause, since=min(refused.time, now), until=until)
    state = state.replace(shortage=shortage.replace(cause=refused.cause, until=max(until, shortage.until)))
    node = node.replace(polls_refused_until=until)
    if not node.reachable and _REFUSED not in node.reason:
        node = node.replace(reason=worded(state, node, node.reason, now))
    return state.with_node(node)


def judge(state: JobState, now: datetime) -> JobState:
    """Ends a shortage that no agent has reported of late, and decides whose silence another one excuses."""
    shortage = state.shortage
    if shortage is None:
        return state
    if now >= shortage.until:
        return state.replace(shortage=None)
    general = _is_general(state, now)
    return state if general is shortage.general else state.replace(shortage=shortage.replace(general=general))


def excused_until(state: RoleInJob, node: NodeState | None = None) -> datetime | None:
    """The time until which silence of the agent says nothing about its node; None where it does now.

    Args:
        state: The role.
        node: The node; None for one whose agent has not reported a shortage.
    """
    times = [state.control_lag_until]
    if state.shortage is not None and state.shortage.general:
        times.append(state.shortage.until)
    elif node is not None:
        times.append(node.polls_refused_until)
    return max((time for time in times if time is not None), default=None)


def waits_until(state: RoleInJob) -> datetime | None:
    """The time until which awaited nodes cannot report that they are ready; None where they can."""
    if state.shortage is None or state.shortage.general:
        return state.shortage.until if state.shortage is not None else None
    awaited = (node for node in state.nodes.values() if node.phase is NodePhase.JOINED or not node.reachable)
    times = (node.polls_refused_until for node in awaited if node.alive)
    return max((time for time in times if time is not None), default=None)


def worded(state: JobFacts, node: NodeState, reason: str, now: datetime) -> str:
    """Why an agent is silent, with the shortage that may be the cause."""
    shortage = state.shortage
    if shortage is None or not (shortage.general or _is_refused(node, now)):
        return reason
    return f"{reason}; {_REFUSED} ({shortage.cause})"


def _is_refused(node: NodeState, now: datetime) -> bool:
    return node.polls_refused_until is not None and now < node.polls_refused_until


def _is_general(state: JobState, now: datetime) -> bool:
    """Whether at least half of the agents that report to the job report the shortage.

    Agents that are silent or have not reported yet say nothing. A state of release 0.3 does not know who has reported
    it.
    """
    if state.behavior < Behavior.RELEASE_0_4:
        return True
    nodes = [node for role in state.roles.values() for node in role.nodes.values() if node.phase in _REPORT]
    refused = sum(_is_refused(node, now) for node in nodes)
    polling = sum(node.reachable and not _is_refused(node, now) for node in nodes)
    return refused >= polling or not refused


def describe(state: JobFacts) -> str:
    """The shortage as a warning with its remedy; empty where there is none."""
    if (shortage := state.shortage) is None:
        return ""
    agents, spared = ("agents", "no node is") if shortage.general else ("some agents", "their nodes are not")
    return (
        f"the Temporal server refuses polls of {agents} since {shortage.since:%Y-%m-%d %H:%M:%S} UTC "
        f"({shortage.cause}): they get leases and commands late, and {spared} given up for their silence. "
        f"Remedy: {remedy(shortage.cause)}"
    )


def next_action(state: JobFacts) -> str:
    """What a job in a shortage waits for; empty where there is none."""
    return (
        "waits until the Temporal server has enough capacity; replaces no node for its silence"
        if state.shortage is not None and state.shortage.general
        else ""
    )
