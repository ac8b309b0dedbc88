"""An agent has reported a failure on its node: what it says about the node, and whether a world is broken by it."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Failure, FailureClass, FailureKind, LossCause, NodePhase
from perdure.workflows.policy.diagnosis import claims, first_steps, own_lines
from perdure.workflows.policy.diagnosis.classification import node_failure
from perdure.workflows.policy.diagnosis.interruptions import count_another_try, interrupt, record_command_failure
from perdure.workflows.policy.facts.agent_messages import accept_message, take_progress
from perdure.workflows.policy.facts.nodes import fresh_ports, lose, with_preparation
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import charges
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState
from perdure.workflows.policy.world import succession

_IN_ITS_WORLD = (FailureKind.RANKS, FailureKind.RENDEZVOUS, FailureKind.UNKNOWN)
"""Failures that say nothing about a command which is in no world."""


def on_failure(state: RoleInJob, failure: Failure, now: datetime) -> RoleInJob:
    """Takes in a failure on a node."""
    known = accept_message(state, failure, now)
    if known is None:
        return state
    state, node = known
    state, failure = claims.verify_failure(state, node, failure)
    if failure.printed is not None:
        state = own_lines.take(state, node.rank, failure.printed)
    reported = node_failure(failure, before_steps=not state.has_stepped and failure.progress is None)
    if reported.ran_out is not None:
        reported = reported.replace(ran_out=reported.ran_out.replace(requested=node.memory))
    node = _after(node, failure, now)
    state = take_progress(state.with_node(node), failure.progress)
    state = first_steps.learn_from_failure(charges.note_error(state, reported), failure)
    if state.outcome is not None:
        return state
    if state.between_stages:
        if failure.kind in (FailureKind.RANKS, FailureKind.RENDEZVOUS) or node.ended:
            return state
        # The command failed after its torchruns, or while it catches up: no world can break.
        return record_command_failure(state, reported, now)
    if node.finished and state.world and node.finished >= state.world.generation:
        failed = failure.kind is FailureKind.COMMAND and not node.ended
        return state.with_node(node.replace(failed=reported)) if failed else state
    if not state.is_member(node):
        return _outside_of_world(state, node, failure, reported, now)
    return _in_world(state, failure, reported, now)


def _after(node: NodeState, failure: Failure, now: datetime) -> NodeState:
    """The node as its failure leaves it: its agent works, and its command waits or starts again."""
    return with_preparation(node, preparing=False).replace(
        phase=NodePhase.READY if failure.kind is FailureKind.RANKS else NodePhase.JOINED,
        since=now,
        store_ports=fresh_ports(node, failure.store_ports),
        reachable=True,
        ranks_ended=failure.kind is FailureKind.NODE,
    )


def _outside_of_world(
    state: RoleInJob, node: NodeState, failure: Failure, reported: NodeFailure, now: datetime
) -> RoleInJob:
    if failure.kind in _IN_ITS_WORLD:
        return state
    # The command ended before it could take part. There is no world to restart it in, so the node is replaced. If it
    # was in an earlier world, its agent may have started the command again since it sent this report.
    # What such a command lacks may be missing on its machine only.
    cause = LossCause.MACHINE if reported.failure is FailureClass.CANNOT_RUN else LossCause.JOB
    state = lose(state, succession.drop(state, node), now, reported.text, cause)
    if state.world is not None:
        return state
    state = count_another_try(state, node, now)
    return interrupt(state, reported, now=now, generation=failure.generation)


def _in_world(state: RoleInJob, failure: Failure, reported: NodeFailure, now: datetime) -> RoleInJob:
    if state.world is not None and failure.generation < state.world.generation:
        commanded_since = state.world_decided_at is not None and failure.time > state.world_decided_at
        if failure.kind in _IN_ITS_WORLD or failure.starts_again or not commanded_since:
            return incidents.explain_earlier_world(state, reported, generation=failure.generation)
    return interrupt(state, reported, now=now, generation=failure.generation)
