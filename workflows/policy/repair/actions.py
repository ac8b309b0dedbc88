"""Carries out the actions of a verdict, and puts them into words: nothing else says what a job does.

What only the next world does (restart ranks, leave nodes out, wait for them) needs no effect here: `world/forming.py`
forms it. The sentence of a verdict is about the culprit's node. Commands of other nodes that start over, too, come
last among the actions, and their failures are in the evidence.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import (
    Action,
    AwaitNodes,
    ExtendFirstStep,
    FailureClass,
    JobPhase,
    LossCause,
    NewWorld,
    NodePhase,
    ReplaceNodes,
    RestartCommands,
    RestartRanks,
    Shrink,
    StartCommands,
    Stop,
    Wait,
)
from perdure.workflows.policy.repair.case import Verdict
from perdure.workflows.policy.state.job import Outcome, RoleInJob
from perdure.workflows.policy.state.role import Interruption
from perdure.workflows.policy.world import stages, succession


def carry_out(state: RoleInJob, verdict: Verdict, now: datetime) -> RoleInJob:
    """Applies the actions of a decision to the nodes, and to the job if it stops."""
    interruption = state.interruption
    for action in verdict.actions:
        match action:
            case Stop():
                failed = Outcome(
                    phase=JobPhase.FAILED, exit_code=action.exit_code, reason=action.reason, decided_at=now
                )
                state = state.replace(outcome=failed)
            case ReplaceNodes() if interruption is not None:
                state = _give_up(state, action.nodes, interruption, verdict.title, now)
            case RestartCommands() if state.between_stages:
                state = stages.restart_commands(state, action.nodes)
            case _:
                pass
    # Between two worlds nothing else follows: no world is broken.
    return state.replace(interruption=None) if state.between_stages and state.outcome is None else state


def commands_to_restart(state: RoleInJob) -> set[int]:
    """Nodes whose command the next world starts again, because it did not enter the current one."""
    actions = state.interruption.actions if state.interruption is not None else ()
    nodes = {rank for action in actions if isinstance(action, RestartCommands) for rank in action.nodes}
    return {rank for rank in nodes if state.nodes[rank].missed_worlds}


def words(actions: tuple[Action, ...]) -> str:
    """What a job does, as one sentence for `perdure explain`."""
    match actions:
        case (Stop(), *_):
            return "stop the job"
        case (NewWorld(reason=reason), *_):
            return f"new generation: {reason}"
        case (RestartRanks(), ExtendFirstStep(), *_):
            return "restart the ranks of every node in place; the next world has twice the time"
        case (RestartRanks(ends_hang=True), *_):
            return "restart the ranks of every node in place, which ends the one that hangs"
        case (RestartRanks(), *_):
            return "restart the ranks of every node in place"
        case (StartCommands(), *_):
            return "start the command again and restart the other ranks in place"
        case (RestartCommands(between_worlds=True), *_):
            return "start the command again on its node; it skips the torchruns that have finished"
        case (RestartCommands(), *_):
            return "start the command again on its node and restart the other ranks in place"
        case (ReplaceNodes(suspected=True, nodes=(rank, *_)) as replace, *_):
            request = _request(replace)
            return f"give node {rank} up although it is only suspected; {request}; restart the other ranks in place"
        case (ReplaceNodes(elsewhere=True), *_):
            return "replace the node, on another machine if one has room, and try once more"
        case (ReplaceNodes(between_worlds=True) as replace, *_):
            return f"{_request(replace)}; its command starts over and skips the torchruns that have finished"
        case (ReplaceNodes(), StartCommands(), *_):
            return "replace the node and start its command again"
        case (ReplaceNodes() as replace, AwaitNodes(patience=patience), *_):
            return f"{_request(replace)} and wait for it, for at most {patience}"
        case (Shrink(size=size, survivors=survivors), ReplaceNodes() as replace, *_):
            return f"continue with {size} of {survivors} survivors; {_request(replace)}; grow when it is ready"
        case _:
            return "; ".join(map(option, actions))


def option(action: Action) -> str:
    """Names an action that was not taken, for the list of options."""
    match action:
        case Wait():
            return "wait longer"
        case Stop():
            return "stop the job"
        case NewWorld():
            return "restart"
        case RestartRanks():
            return "restart the others" if action.others else "restart in place"
        case StartCommands() | RestartCommands():
            return "start it again on its node"
        case ReplaceNodes():
            return "replace the node" if action.nodes else "replace a node"
        case Shrink():
            return "continue with fewer nodes"
        case AwaitNodes():
            return "wait"
        case ExtendFirstStep():
            return "give the first step more time"


def replacement(action: ReplaceNodes) -> str:
    """The replacement of a node as a fact, for the title of an incident."""
    return "replacement requested" if action.creates_nodes else "its place is open"


def _request(action: ReplaceNodes) -> str:
    return "ask for a replacement" if action.creates_nodes else "open the place to a machine that runs `perdure join`"


def _give_up(
    state: RoleInJob, ranks: tuple[int, ...], interruption: Interruption, reason: str, now: datetime
) -> RoleInJob:
    for rank in ranks:
        node = state.nodes.get(rank)
        # A replacement that an earlier verdict on the same world requested has not failed.
        if node is not None and node.alive and state.is_member(node):
            dropped = succession.drop(
                state,
                node,
                phase=NodePhase.LOST,
                since=now,
                reason=reason,
                loss_cause=_cause(rank, interruption),
                # The next incarnation must reach the rendezvous before a world waits for it.
                failed_starts=max(node.failed_starts, min(node.missed_worlds, 1)),
            )
            state = state.with_node(dropped)
    return state


def _cause(rank: int, interruption: Interruption) -> LossCause:
    """The cause of the loss of a node that is given up although it is not known to be gone."""
    if rank in interruption.ranks_with(FailureClass.NODE_UNRESPONSIVE, FailureClass.CANNOT_RUN):
        return LossCause.MACHINE
    # The node itself reports that something ends it. If its machine were the reason, the backend would have reported
    # it.
    ended = interruption.ranks_with(FailureClass.NODE_LOST, FailureClass.DISRUPTED)
    return LossCause.WANTED if rank in ended else LossCause.UNKNOWN
