"""Gives up nodes that stay unreachable while nothing trains: they cannot receive the next world.

While a world steps, an unreachable node is no evidence against it, and nothing is given up.
"""

from __future__ import annotations

from datetime import datetime

from perdure.spec.job import JobSpec
from perdure.workflows.policy.capacity import waiting
from perdure.workflows.policy.diagnosis import shortages
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.role import Interruption
from perdure.workflows.policy.world import stages


def give_up(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Gives up members that stay unreachable while their world is stopped: they cannot receive the next one."""
    interruption = state.interruption
    if state.between_stages:
        return _give_up_between_worlds(state, job, now)
    due = next_look(state, job)
    if interruption is None or due is None or now < due or _may_still_train(state, interruption):
        return state
    for node in state.members:
        if node.alive and not node.reachable:
            text = f"node {node.rank} stayed unreachable while its world was stopped: {node.reason}"
            failure = NodeFailure.unresponsive(node.rank, text, now)
            state = incidents.add_evidence(state, failure.evidence, now=now)
            state = state.replace(interruption=_because_of(interruption, failure))
            interruption = state.interruption or interruption
    return state


def next_look(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The time from which an unreachable member is given up; None while no world is known to be broken."""
    if state.interruption is None or not state.interruption.decided:
        return None
    deadline = state.interruption.since + job.timing.lease.timeout
    excused = shortages.excused_until(state)
    return max(deadline, excused) if excused is not None else deadline


def _because_of(interruption: Interruption, failure: NodeFailure) -> Interruption:
    """Adds a failure to the interruption; what a request began becomes the story of a failure."""
    if interruption.requested is not None:
        return Interruption(since=interruption.since, failures=(failure,))
    return interruption.replace(failures=(*interruption.failures, failure), actions=())


def _may_still_train(state: RoleInJob, interruption: Interruption) -> bool:
    """Whether only a request interrupts the world, and all its members are alive."""
    if interruption.requested is None:
        return False
    alive = sum(node.alive for node in state.members)
    return state.world is None or alive == state.world.nodes


def _give_up_between_worlds(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Gives up an unreachable node between two worlds. It may work, so this happens only once nothing else is waited
    for."""
    limit = waiting.limit_of(state, job)
    if limit is None or now < limit.at:
        return state
    for node in stages.silent_nodes(state):
        text = f"node {node.rank} stayed unreachable while all others waited for it: {node.reason}"
        state = interrupt(state, NodeFailure.unresponsive(node.rank, text, now), now=now)
    return state
