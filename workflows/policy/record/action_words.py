"""Puts actions into the words of `perdure explain`: nothing else says what a job does.

The sentence of a decision is about the culprit's node. Commands of other nodes that start over, too, come last among
the actions, and their failures are in the evidence.
"""

from __future__ import annotations

from perdure.contract import (
    Action,
    AwaitNodes,
    EndHang,
    ExchangePlaces,
    ExtendFirstStep,
    NewWorld,
    RaiseMemory,
    ReplaceNodes,
    RestartCommands,
    RestartRanks,
    RollBack,
    Shrink,
    StartCommands,
    StartOver,
    Stop,
    Suspend,
    Wait,
)
from perdure.spec.durations import format_duration
from perdure.spec.quantities import quantity_of_bytes


def words(actions: tuple[Action, ...]) -> str:
    """What a job does, as one sentence for `perdure explain`."""
    also = [option(action) for action in actions if isinstance(action, RollBack | RaiseMemory)]
    rest = tuple(action for action in actions if not isinstance(action, RollBack | RaiseMemory))
    return "; ".join([*([_words(rest)] if rest else []), *also])


def _words(actions: tuple[Action, ...]) -> str:
    match actions:
        case (Stop(), *_):
            return "stop the job"
        case (Suspend(alone=alone), *_):
            return f"release all nodes until the {'role' if alone else 'job'} is resumed"
        case (NewWorld(reason=reason), *_):
            return f"new generation: {reason}"
        case (RestartRanks(), ExtendFirstStep(), *_):
            return "restart the ranks of every node in place; the next world has twice the time"
        case (EndHang(), *_):
            return "restart the ranks of every node in place, which ends the one that hangs"
        case (ExchangePlaces(nodes=nodes), *_):
            named = " and ".join(map(str, nodes))
            return f"restart the ranks of every node in place, with the places of nodes {named} exchanged"
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
        case (ReplaceNodes(between_worlds=True) as replace, *_):
            return f"{_request(replace)}; its command starts over and skips the torchruns that have finished"
        case (ReplaceNodes() as replace, RestartRanks(others=True), *_):
            away = ", on another machine if one has room" if replace.elsewhere else ""
            return f"{_request(replace)}{away}; restart the other ranks in place"
        case (ReplaceNodes(elsewhere=True), *_):
            return "replace the node, on another machine if one has room, and try once more"
        case (ReplaceNodes(), StartCommands(), *_):
            return "replace the node and start its command again"
        case (ReplaceNodes() as replace, AwaitNodes(patience=patience), *_):
            limit = f"for at most {format_duration(patience)}" if patience else "for as long as it takes"
            return f"{_request(replace)} and wait for it, {limit}"
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
        case Suspend(alone=alone):
            return f"suspend the {'role' if alone else 'job'}"
        case StartOver():
            return "start over"
        case NewWorld():
            return "restart"
        case EndHang():
            return "restart in place"
        case ExchangePlaces():
            return "exchange the places of two nodes"
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
        case RaiseMemory(memory=memory, before=before, in_place=ranks) if memory and ranks:
            known = f"nodes {', '.join(map(str, ranks))} get" if ranks[1:] else f"node {ranks[0]} gets"
            more, less = quantity_of_bytes(memory), quantity_of_bytes(before)
            return f"{known} {more} of memory instead of {less} without a new pod, and new nodes request as much"
        case RaiseMemory(memory=memory, before=before) if memory:
            return f"new nodes request {quantity_of_bytes(memory)} of memory instead of {quantity_of_bytes(before)}"
        case RaiseMemory():
            return "request more memory"
        case RollBack(after=step):
            return f"load a state of step {step:,} or before" if step >= 0 else "load no state of this run"


def replacement(action: ReplaceNodes) -> str:
    """The replacement of a node as a fact, for the title of an incident."""
    return "replacement requested" if action.creates_nodes else "its place is open"


def _request(action: ReplaceNodes) -> str:
    return "ask for a replacement" if action.creates_nodes else "open the place to a machine that runs `perdure join`"
