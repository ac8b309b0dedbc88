"""Asks about members that are not known to have entered their world, so that no lost report leaves a job idle.

An agent reports a command that does not enter in time (`Node.overdue`). The job does not rely on that report: a little
later it asks the groups, which send the world to those members again. The answer says which world the node entered
last; an agent that does not take the command is unresponsive. A member that has entered is never asked for its first
step, for which `perdure.workflows.policy.diagnosis.first_steps` has a limit of its own.
"""

from __future__ import annotations

from datetime import datetime

from perdure.spec.job import JobSpec
from perdure.workflows.policy.diagnosis import shortages
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts.agent_messages import CONTROL_LAG, CONTROL_LAG_GRACE
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure


def entry_deadline(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The time for the job to ask for a member, or give it up; None if every member is known to be in the world."""
    return min(_deadlines(state, job).values(), default=None)


def inquire(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Asks about members that should have entered their world by now, and gives up those that do not answer."""
    deadlines = _deadlines(state, job)
    due = {rank: deadline for rank, deadline in deadlines.items() if deadline <= now}
    if not due:
        return state
    if now - min(due.values()) > CONTROL_LAG:
        # The workflow could not run in time, so agents could not report either.
        return state.replace(control_lag_until=now + CONTROL_LAG_GRACE)
    silent = [node for node in state.members if node.rank in due and not node.reachable]
    for node in silent:
        text = f"node {node.rank} is silent, and not known to run in generation {state.generation}: {node.reason}"
        state = interrupt(state, NodeFailure.unresponsive(node.rank, text, now), now=now)
    if silent:
        return state
    return state.replace(inquiry=state.inquiry + 1, inquired_at=now)


def _deadlines(state: RoleInJob, job: JobSpec) -> dict[int, datetime]:
    """The time until which the job waits to learn that a member is in the world, by node (slot)."""
    world, decided = state.world, state.world_decided_at
    patience = job.timing.rendezvous.enter_timeout
    if not patience:
        return {}
    if world is None or decided is None or state.interruption is not None or state.rests:
        return {}
    late = [node for node in state.members_not_running if node.alive]
    if not late:
        return {}
    # An agent counts from the time when it took the world, and knows more: its report should come first.
    patience += job.timing.commands.of(state.nodes_max).schedule_to_start
    found: dict[int, datetime] = {}
    for node in late:
        if node.entered < world.generation:
            deadline = max(decided, state.inquired_at or decided) + patience
        elif not node.reachable:
            deadline = max(decided, node.silent_since or decided) + patience
        else:
            continue
        found[node.rank] = max(deadline, shortages.excused_until(state, node) or deadline)
    return found
