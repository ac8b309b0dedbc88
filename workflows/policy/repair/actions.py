"""Carries out a verdict: its actions are the effects, and the incident records the same actions.

What only the next world does (restart ranks, leave nodes out, wait for them) needs no effect here: `world/forming.py`
forms it, and `repair/memory.py` remembers it.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from perdure.contract import (
    Considered,
    ExchangePlaces,
    FailureClass,
    JobPhase,
    LossCause,
    NodePhase,
    RaiseMemory,
    ReplaceNodes,
    RestartCommands,
    RollBack,
    Stop,
    Suspend,
)
from perdure.workflows.policy.capacity import memory_in_place, memory_requests
from perdure.workflows.policy.checkpoints import trust
from perdure.workflows.policy.diagnosis.failures import GONE
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.record.action_words import option
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.repair.case import Verdict
from perdure.workflows.policy.state.job import Outcome, RoleInJob
from perdure.workflows.policy.state.role import Interruption
from perdure.workflows.policy.world import stages, succession


def apply(state: RoleInJob, verdict: Verdict, now: datetime, *, also_failed: Collection[int] = ()) -> RoleInJob:
    """Records a verdict in the open incident, and carries it out.

    Args:
        state: The job.
        verdict: The decision.
        now: The time.
        also_failed: Nodes that failed by themselves, with or without the culprit.
    """
    interruption = state.interruption
    state = incidents.record_decision(
        state,
        now=now,
        title=verdict.title,
        rule=verdict.rule,
        actions=verdict.actions,
        failure=verdict.failure,
        culprit=verdict.culprit,
        considered=tuple(
            Considered(option=option(rejected.action), why_not=rejected.why_not) for rejected in verdict.rejected
        ),
        suspects=verdict.suspects,
        hang=interruption.hang if interruption is not None and verdict.failure is FailureClass.RANK_HANG else None,
        slowness=interruption.slowness if interruption is not None else None,
        also_failed=also_failed,
    )
    return carry_out(state, verdict, now)


def carry_out(state: RoleInJob, verdict: Verdict, now: datetime) -> RoleInJob:
    """Applies the actions of a decision to the nodes, and to the job if it stops or is suspended."""
    interruption = state.interruption
    for action in verdict.actions:
        match action:
            case Stop():
                failed = Outcome(
                    phase=JobPhase.FAILED, exit_code=action.exit_code, reason=action.reason, decided_at=now
                )
                state = state.stop(failed)
            case Suspend(alone=alone):
                suspended = {"suspended_alone": True} if alone else {"suspended": True}
                state = state.replace(**suspended, reason=verdict.title, request_reasons={})
            case ReplaceNodes() if interruption is not None:
                state = _give_up(state, action, interruption, verdict.title, now)
            case RaiseMemory():
                state = memory_in_place.begin(memory_requests.take(state, action), action, now)
            case RollBack():
                state = trust.distrust_unsound(state, action)
            case RestartCommands() if state.between_stages:
                state = stages.restart_commands(state, action.nodes)
            case _:
                pass
    # Between two worlds nothing else follows: no world is broken.
    return memory.close_interruption(state, now) if state.between_stages else state


def places_to_exchange(state: RoleInJob) -> tuple[int, ...]:
    """The two nodes whose places the next world exchanges; empty for none."""
    actions = state.interruption.actions if state.interruption is not None else ()
    return next((action.nodes for action in actions if isinstance(action, ExchangePlaces)), ())


def commands_to_restart(state: RoleInJob) -> set[int]:
    """Nodes whose command the next world starts again, because it did not enter the current one."""
    actions = state.interruption.actions if state.interruption is not None else ()
    nodes = {rank for action in actions if isinstance(action, RestartCommands) for rank in action.nodes}
    return {rank for rank in nodes if state.is_late(state.nodes[rank])}


def _give_up(
    state: RoleInJob, given_up: ReplaceNodes, interruption: Interruption, reason: str, now: datetime
) -> RoleInJob:
    late = interruption.ranks_with(FailureClass.RENDEZVOUS_TIMEOUT)
    for rank in given_up.nodes:
        node = state.nodes.get(rank)
        # A replacement that an earlier verdict on the same world requested has not failed.
        if node is not None and node.alive and state.is_member(node):
            did_not_enter = (rank in late and state.is_late(node)) or memory.times(state, RestartCommands, node) > 0
            dropped = succession.drop(
                state,
                node,
                phase=NodePhase.LOST,
                since=now,
                reason=reason,
                loss_cause=LossCause.MACHINE if given_up.elsewhere else _cause(rank, interruption),
                # The next incarnation must reach the rendezvous before a world waits for it.
                failed_starts=max(node.failed_starts, int(did_not_enter)),
            )
            state = state.with_node(dropped)
    return state


def _cause(rank: int, interruption: Interruption) -> LossCause:
    """The cause of the loss of a node that is given up although it is not known to be gone."""
    machine = (
        FailureClass.NODE_UNRESPONSIVE,
        FailureClass.CANNOT_RUN,
        FailureClass.HARDWARE,
        FailureClass.CORRUPTION,
        FailureClass.STRAGGLER,
        FailureClass.THROTTLED,
    )
    if rank in interruption.ranks_with(*machine):
        return LossCause.MACHINE
    # The node itself reports that something ends it. If its machine were the reason, the backend would have reported
    # it.
    return LossCause.WANTED if rank in interruption.ranks_with(*GONE) else LossCause.UNKNOWN
