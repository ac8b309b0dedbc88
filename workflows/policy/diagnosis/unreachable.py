"""Gives up nodes that stay unreachable while nothing trains: they cannot receive the next world.

While a world steps, an unreachable node is no evidence against it, and nothing is given up. A stopped world may wait
for long, for a replacement or for a pause to end, and what its members have in memory may be all that is left of the
training. So a member that falls silent meanwhile has the time that its agent needs to poll again after an outage; and
where none is heard of, it may be the way to all of them that is interrupted.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import NodePhase
from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.capacity import waiting
from perdure.workflows.policy.diagnosis import shortages
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts.agent_messages import CONTROL_LAG_GRACE
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState
from perdure.workflows.policy.state.role import Interruption
from perdure.workflows.policy.world import stages

_REPORTED_WITHIN = timedelta(seconds=2)
"""The longest time, on a busy server, from the end of a lease to its report."""


def give_up(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Gives up members that stay unreachable while their world is stopped: they cannot receive the next one."""
    interruption = state.interruption
    if state.between_stages:
        return _give_up_between_worlds(state, job, now)
    if interruption is None or _may_still_train(state, interruption):
        return state
    before = state
    for node in _silent_members(state):
        # The first that is given up makes another interruption, of which nothing is decided yet.
        deadline = _deadline(before if state.behavior >= Behavior.RELEASE_0_4 else state, job, node)
        if deadline is not None and now >= deadline:
            text = f"node {node.rank} stayed unreachable while its world was stopped: {node.reason}"
            failure = NodeFailure.unresponsive(node.rank, text, now)
            state = incidents.add_evidence(state, failure.evidence, now=now)
            state = state.replace(interruption=_because_of(state.interruption or interruption, failure))
    return state


def next_looks(state: RoleInJob, job: JobSpec) -> list[datetime | None]:
    """The times from which unreachable members are given up: the earliest, and that of each silent one."""
    return [_deadline(state, job, None), *(_deadline(state, job, node) for node in _silent_members(state))]


def ends_of_silence(state: RoleInJob, job: JobSpec) -> list[datetime | None]:
    """The times from which members that are silent now are given up, where their world is known to be broken."""
    if state.between_stages or state.interruption is None or _may_still_train(state, state.interruption):
        return []
    return [_deadline(state, job, node) for node in _silent_members(state)]


def _deadline(state: RoleInJob, job: JobSpec, node: NodeState | None) -> datetime | None:
    """The time from which a silent node is given up, or any; None while no world is known to be broken."""
    interruption = state.interruption
    if interruption is None or not interruption.decided:
        return None
    deadline = interruption.since + job.timing.lease.timeout
    if node is not None:
        deadline = max(deadline, _time_to_return(state, interruption, job, node) or deadline)
    return max(deadline, shortages.excused_until(state, node) or deadline)


def _time_to_return(state: RoleInJob, interruption: Interruption, job: JobSpec, node: NodeState) -> datetime | None:
    """The time that a member has which fell silent after its world was stopped; None for one that broke it."""
    since = node.silent_since
    lease = job.timing.lease.of(state.nodes_max)
    # A machine that is gone broke the world, and its lease ends right after that.
    with_the_world = interruption.since + lease.timeout + lease.schedule_to_start + _REPORTED_WITHIN
    if state.behavior < Behavior.RELEASE_0_4 or since is None or since <= with_the_world:
        return None
    heard = (NodePhase.JOINED, NodePhase.READY)
    is_alone = any(other.reachable and other.phase in heard for other in state.nodes.values())
    return since + (CONTROL_LAG_GRACE if is_alone else job.timing.processes.presumed_gone)


def _silent_members(state: RoleInJob) -> list[NodeState]:
    return [node for node in state.members if node.alive and not node.reachable]


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
