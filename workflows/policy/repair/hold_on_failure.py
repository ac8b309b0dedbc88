"""A job that failed keeps its nodes for a while (`hold_on_failure`), so that a user can inspect them.

Nothing is started, stopped or replaced meanwhile. The hold ends with its time, or when a user cancels the job; the job
has failed in either case.
"""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from perdure.contract import JobPhase, NodePhase
from perdure.spec.job import JobSpec
from perdure.workflows.policy.state.job import JobFacts, JobState
from perdure.workflows.policy.state.node import NodeState

_Facts = TypeVar("_Facts", bound=JobFacts)

_DEADLINE = 5
"""The exit code of a job that has only reached its deadline."""


def is_inspectable(node: NodeState) -> bool:
    """Whether the node has anything left to inspect."""
    return node.alive and node.phase not in (NodePhase.REQUESTED, NodePhase.PENDING)


def begin(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Holds the nodes of a job that was just stopped, if it failed, `hold_on_failure` is set, and it has any nodes."""
    outcome, hold = state.outcome, job.hold_on_failure
    if outcome is None or not hold or outcome.phase is not JobPhase.FAILED or outcome.exit_code == _DEADLINE:
        return state
    if not any(is_inspectable(node) for role in state.roles.values() for node in role.nodes.values()):
        return state
    return state.replace(outcome=outcome.replace(held_until=now + hold))


def end_when_due(state: JobState, now: datetime) -> JobState:
    """Ends the hold once its time is over."""
    outcome = state.outcome
    if outcome is None or outcome.held_until is None or now < outcome.held_until:
        return state
    return release(state)


def release(state: _Facts) -> _Facts:
    """Ends the hold, so that the nodes are wound down."""
    if state.outcome is None:
        return state
    return state.replace(outcome=state.outcome.replace(held_until=None))
