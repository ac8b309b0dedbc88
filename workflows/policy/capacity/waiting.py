"""Waiting for nodes: a job with too few says what it waits for and until when, and never waits without a reason.

| waits for | limit | then |
|-|-|-|
| machines for the first world: not admitted by a queue, or no machine has room | `limits.queue_timeout` | stops |
| nodes of the first world that have a machine | `timing.rendezvous.join_timeout` | stops |
| replacements, with fewer than `nodes.min` left | `recovery.replace_timeout` | stops |
| commands that work and have not started their torchrun, where a world needs no other nodes | none | |
| replacements, because `recovery.on_capacity_loss` is `wait` | `recovery.replace_timeout` | shrinks |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from perdure.base.words import counted
from perdure.contract import Evidence, EvidenceSource, FailureClass, JobPhase, NodePhase, Stop, Wait
from perdure.spec.durations import format_duration
from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import other_size
from perdure.workflows.policy.diagnosis import shortages
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import actions
from perdure.workflows.policy.repair.case import Rejected, Verdict
from perdure.workflows.policy.state.job import Outcome, RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world import succession
from perdure.workflows.policy.world.rendezvous import usable

_ON_THEIR_WAY = {
    NodePhase.CREATED: "its agent has not reported yet",
    NodePhase.JOINED: "its command has not reached the rendezvous",
}
"""Reasons for nodes that give none themselves."""
_IS_CHECKED = "its machine is being checked"


@dataclass(frozen=True)
class Limit:
    """The end of a wait, and the field that sets it."""

    at: datetime
    field: str


def in_queue(state: RoleInJob) -> bool:
    """Whether the first world cannot be formed because too many nodes have no machine."""
    nodes = [node for node in state.nodes.values() if node.alive and node.rank < state.nodes_max]
    placed = sum(not node.queued for node in nodes)
    enough = usable(placed, minimum=state.nodes_min, maximum=state.nodes_max, unit=state.unit)
    return state.world is None and placed < len(nodes) and not enough


def wait(state: RoleInJob, job: JobSpec, now: datetime, *, available: int, missing: str = "") -> RoleInJob:
    """Continues to wait while the available nodes make no world, or stops the job when that has taken too long.

    Args:
        state: The job.
        job: The job's specification.
        now: The time.
        available: The number of nodes that could be members.
        missing: What else a world lacks, if there are enough of them.
    """
    if _preparing_suffices(state, available):
        # If one of these nodes fails or is lost, its successor has the full time of a node.
        return state.replace(waiting_since=None, queued_since=None, ready_since=None)
    if in_queue(state):
        state = state.replace(queued_since=state.queued_since or now, waiting_since=None, ready_since=None)
    else:
        state = state.replace(waiting_since=state.waiting_since or now, ready_since=None)
    limit = limit_of(state, job)
    if limit is None or now < limit.at:
        return state
    blocked = blocking_node(state)
    since = state.queued_since if state.waiting_since is None else state.waiting_since
    waited_for = format_duration(limit.at - (since or now))
    missing = missing or f"nodes.min is {state.nodes_min}"
    reason = f"{counted(available, 'node', 'were')} ready after {waited_for} ({limit.field}), and {missing}" + (
        f"; node {blocked.rank}: {blocked.reason}" if blocked else ""
    )
    if blocked is not None and blocked.uncreated_since is not None:
        return _stop_at_refusal(state, blocked, limit, reason, now)
    return state.stop(Outcome(phase=JobPhase.FAILED, exit_code=3, reason=reason, decided_at=now))


def _stop_at_refusal(state: RoleInJob, node: NodeState, limit: Limit, reason: str, now: datetime) -> RoleInJob:
    """Stops the job because a node could not be created for as long as it waits."""
    text = f"node {node.rank} could not be created: {node.reason}"
    evidence = Evidence(time=now, source=EvidenceSource.BACKEND, rank=node.rank, text=text)
    state = incidents.add_evidence(state, evidence, now=now)
    verdict = Verdict(
        rule='refused/2 "too few nodes for as long as the job waits: stop"',
        title=text,
        actions=(Stop(reason=reason, exit_code=3),),
        failure=FailureClass.CREATE_FAILED,
        culprit=node.rank,
        rejected=(Rejected(Wait(), f"{limit.field} is over"),),
    )
    return actions.apply(state, verdict, now)


def _preparing_suffices(state: RoleInJob, available: int) -> bool:
    """Whether a world is possible as soon as the commands that still work have started their torchrun."""
    preparing = sum(
        node.alive and node.reachable and node.preparing and node.rank < state.nodes_max and not state.is_member(node)
        for node in state.nodes.values()
    )
    total, needed = available + preparing, other_size.needed_nodes(state)
    least = state.nodes_min if needed is None else needed
    return bool(preparing and usable(total, minimum=least, maximum=state.nodes_max, unit=state.unit))


def end_in_vain(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Ends a wait whose time is over while a member is silent: nodes may be ready with it. Once it is back or replaced,
    the wait begins again."""
    limit = limit_of(state, job)
    if state.behavior < Behavior.RELEASE_0_4 or limit is None or now < limit.at:
        return state
    return state.replace(waiting_since=None, queued_since=None)


def limit_of(state: RoleInJob, job: JobSpec) -> Limit | None:
    """The end of the job's wait; None where it does not wait, or waits indefinitely. Nodes cannot report that they are
    ready to a control plane that lacks capacity, so no wait ends then."""
    limit = _own_limit(state, job)
    refused = shortages.waits_until(state)
    return limit if limit is None or refused is None else replace(limit, at=max(limit.at, refused))


def _own_limit(state: RoleInJob, job: JobSpec) -> Limit | None:
    if state.waiting_since is None:
        patience = job.limits.queue_timeout
        if state.queued_since is None or patience is None:
            return None
        return Limit(state.queued_since + patience, "limits.queue_timeout")
    if state.world is None:
        return Limit(state.waiting_since + job.timing.rendezvous.join_timeout, "timing.rendezvous.join_timeout")
    return Limit(state.waiting_since + job.recovery.replace_timeout, "recovery.replace_timeout")


def blocking_node(state: RoleInJob) -> NodeState | None:
    """The node that the job waits for, with the reason why it is not ready; nodes without a machine first, then those
    that cannot be created."""
    known = map(succession.describe, state.nodes.values())
    nodes = [
        node
        for node in known
        if node.reason
        and (
            node.predecessor
            or node.phase is not NodePhase.READY
            or not node.reachable
            or node.stage < state.stages_complete
        )
    ]
    if nodes:
        return min(nodes, key=lambda node: (not node.queued, node.uncreated_since is None, node.rank))
    late = [
        node
        for node in state.nodes.values()
        if (node.phase in _ON_THEIR_WAY or (node.alive and node.unchecked)) and not state.is_member(node)
    ]
    found = min(late, key=lambda node: (node.checked_runs, node.rank), default=None)
    return found.replace(reason=_ON_THEIR_WAY.get(found.phase, _IS_CHECKED)) if found is not None else None


def describe(state: RoleInJob, job: JobSpec, *, available: int) -> str:
    """Describes, for people, how many nodes are ready, which one is missing and why, and what ends the wait."""
    needed = other_size.needed_nodes(state)
    if needed is None:
        words = [f"{available:,} of at least {counted(state.nodes_min, 'node', 'are')} ready"]
    else:
        words = [f"{available:,} of {counted(needed, 'node', 'are')} ready", other_size.why_needed(state)]
    if blocked := blocking_node(state):
        words.append(f"node {blocked.rank}: {blocked.reason}")
    if limit := limit_of(state, job):
        least = state.nodes_min if needed is None else needed
        enough = usable(available, minimum=least, maximum=state.nodes_max, unit=state.unit)
        words.append(f"{'continues without it' if enough else 'stops'} at {limit.at:%H:%M:%S} UTC ({limit.field})")
    elif state.queued_since is not None:
        words.append("waits for as long as it takes (limits.queue_timeout is not set)")
        placed = [node for node in state.nodes.values() if node.alive and not node.queued]
        if held := sum(node.phase is not NodePhase.REQUESTED for node in placed):
            # Two jobs may each hold what the other one waits for.
            words.append(f"{counted(held, 'node', 'keep')} a machine meanwhile, for which other jobs may wait")
    return "; ".join(words)
