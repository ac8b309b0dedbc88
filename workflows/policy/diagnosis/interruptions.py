"""Collects failures that break the current world, or happen between two worlds, until a verdict; each try counts once.

Failures of several nodes with one cause are one interruption, and so one restart in the budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from perdure.contract import Evidence, EvidenceSource, RestartCommands
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.diagnosis import rules
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES, GONE, VICTIMS
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState
from perdure.workflows.policy.state.role import Interruption


def interrupt(
    state: RoleInJob,
    failure: NodeFailure,
    *,
    now: datetime,
    generation: int = 0,
    last_steps: Mapping[int, datetime] | None = None,
) -> RoleInJob:
    """Records that the current world is over, and one piece of evidence for it.

    Args:
        state: The job.
        failure: The evidence.
        now: The time.
        generation: The world in which the failure is known to have happened; 0 where that is not known.
        last_steps: When nodes stepped for the last time that were not reported as stalled.
    """
    accepted = max(generation, state.nodes[failure.rank].commanded, state.nodes[failure.rank].stepping)
    took_part = FAILURE_CLASSES[failure.failure].took_part
    took_part = took_part and state.world is not None and accepted >= state.world.generation
    if _is_another_incident(state, failure, took_part=took_part):
        state = incidents.follow_with_another(state, failure.time)
    interruption = state.interruption or Interruption(since=now)
    if interruption.requested is not None:
        silent = any(node.alive and not node.reachable for node in state.members)
        spoils = state.behavior >= Behavior.RELEASE_0_4 and (failure.number or failure.corruption) is not None
        if not silent and not spoils:
            # A user's request is in progress and restarts every rank anyway.
            return incidents.record_failure_beside_request(state, failure, now=now)
        # The request waits for a silent member while the others train, and now they no longer do. Or the next world
        # must not load what this one has saved last, and perhaps not run on this machine.
        interruption = Interruption(since=now)
    stalled = {node.rank: node.stalled_since or now for node in state.stalled if not node.stalled_at_start}
    for rank, time in {**(last_steps or {}), **stalled}.items():
        # The job did nothing about the stall, but the interruption began here.
        text = f"node {rank} stepped for the last time"
        evidence = Evidence(time=time, source=EvidenceSource.AGENT, rank=rank, text=text)
        state = incidents.add_evidence(state, evidence, now=now)
    is_cause = failure.failure not in VICTIMS and all(one.failure in VICTIMS for one in interruption.failures)
    state = incidents.add_evidence(state, failure.evidence, now=now, log_tail=failure.log_tail, is_cause=is_cause)
    for text in rules.evidence(failure):
        evidence = Evidence(time=failure.time, source=EvidenceSource.AGENT, rank=failure.rank, text=text)
        state = incidents.add_evidence(state, evidence, now=now)
    return state.replace(
        interruption=interruption.replace(
            # The incident keeps the output.
            failures=(*interruption.failures, failure.replace(log_tail="")),
            # A new culprit was reported before the next world is formed: decide again with everything that is known.
            actions=interruption.actions if failure.failure in VICTIMS else (),
        )
    )


def _is_another_incident(state: RoleInJob, failure: NodeFailure, *, took_part: bool) -> bool:
    """Returns whether a failure belongs to the world that the open incident led to, and so begins an incident.

    Args:
        state: The job, before the failure is taken in.
        failure: The reported failure.
        took_part: Whether its node had accepted the current world.
    """
    incident, world = state.open_incident, state.world
    if incident is None or world is None or state.interruption is not None:
        return False
    unexplained = incident.failure in VICTIMS
    continues = unexplained and (failure.failure in VICTIMS or not took_part)
    continues = continues or (not took_part and incident.culprit == failure.rank)
    return not continues and incident.generation_after == world.generation


def count_another_try(state: RoleInJob, node: NodeState, now: datetime) -> RoleInJob:
    """Counts another failure of a command that fails again before it entered any world: it is a failure of its own."""
    interruption = state.interruption
    if interruption is None or not interruption.decided:
        return state
    if node.rank not in {failure.rank for failure in interruption.failures}:
        # The commands of the other nodes fail for the same reason at about the same time.
        return state
    return state.replace(interruption=Interruption(since=now))


def record_command_failure(state: RoleInJob, failure: NodeFailure, now: datetime) -> RoleInJob:
    """Records that a command failed between two worlds. The same line of a script fails on every node, sooner or later:
    all first failures are one try of the job, all second ones another, and each try is one restart in the budgets."""
    node = state.nodes[failure.rank]
    fails = failure.failure not in GONE
    is_known_try = memory.times(state, RestartCommands, node) < memory.most_times(state, RestartCommands)
    counted = fails and state.interruption is None and is_known_try
    # Between two worlds the nodes depend on no peers.
    state = interrupt(state, failure.replace(source=EvidenceSource.AGENT), now=now)
    if not counted or state.interruption is None:
        return state
    return state.replace(interruption=state.interruption.replace(counted=True))
