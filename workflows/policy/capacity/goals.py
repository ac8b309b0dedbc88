"""What each policy of `scaling` makes of the measurements: pure choices among numbers of nodes.

A choice has its reason, for users, and where no number reaches the goal, what would. Goals of time and money look at
the rest of the training as it has gone until then: pauses, such as evaluations and saves, go on as before. They change
the number only where the new one reaches the goal with something to spare, and leave it while the present one does, so
that neither noise nor a pause swings it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from perdure.base.words import counted, do
from perdure.spec.scaling import BatchSize, Scaling, ScalingPolicy
from perdure.workflows.policy.capacity.throughput import Throughput

_TO_CHANGE = 0.1
"""What a number of nodes must have to spare to be changed to, as a share of the rest."""
_TO_STAY = 0.02
"""What the present number must have to spare to be kept."""
_WORTH_A_CHANGE = 0.2
"""What a change must save, of nodes or of time, while the present number reaches the goal."""
_LOOK_BEYOND = 8
"""Up to this many times the largest number is looked for one that would reach the goal."""
_MOST_LOOKS = 200
_HOUR = 3600
_FORESEEN = 3e9
"""Seconds, a century: later times are not told."""


class Choice(NamedTuple):
    """A number of nodes."""

    nodes: int | None
    """None where too little is known to choose."""
    why: str
    """The reason, for users."""
    problem: str = ""
    """Why no number reaches the goal, and what would; empty where one does."""
    urgent: bool = False
    """The goal is missed with the present number."""


class Outlook(NamedTuple):
    """What is left of a training, and what was used."""

    now: datetime
    present: int
    """Nodes that train."""
    steps: float | None = None
    """Steps that are left, as the present world counts them; None where that is not known."""
    pauses: float = 1.0
    """The time that steps take together with all pauses, in times of the steps alone."""
    change: timedelta = timedelta()
    """What a change of the number of nodes takes."""
    node_hours: float = 0.0
    """Hours that all nodes of the role have taken together."""
    ranks: float = 1.0
    """Ranks of a node."""
    fixed_steps: bool = False
    """The training makes the same steps with any number of nodes; otherwise their number depends on the samples of
    one."""


def choose(scaling: Scaling, throughput: Throughput, sizes: Sequence[int], outlook: Outlook) -> Choice:
    """Returns what the policy chooses.

    Args:
        scaling: The policy and its goal.
        throughput: What is known of the speed.
        sizes: The numbers of nodes to choose from, ascending.
        outlook: What is left.
    """
    match scaling.policy:
        case ScalingPolicy.EFFICIENT:
            return _efficient(scaling, throughput, sizes)
        case ScalingPolicy.DEADLINE:
            return _deadline(scaling, throughput, sizes, outlook)
        case ScalingPolicy.BUDGET:
            return _budget(scaling, throughput, sizes, outlook)
        case ScalingPolicy.MAX | ScalingPolicy.MANUAL:
            return Choice(None, f"scaling.policy is {scaling.policy}: a user chooses the number of nodes")


def meets(scaling: Scaling, throughput: Throughput, outlook: Outlook, nodes: int) -> bool | None:
    """Whether a number of nodes reaches the goal; None where that is not known, or the policy has none."""
    seconds = _rest(scaling, throughput, outlook, nodes)
    if seconds is None:
        return None
    match scaling.policy:
        case ScalingPolicy.DEADLINE if scaling.finish_by is not None:
            return seconds <= (scaling.finish_by - outlook.now).total_seconds()
        case ScalingPolicy.BUDGET:
            return _total_hours(outlook, nodes, seconds) <= _hours_allowed(scaling, outlook)
        case _:
            return None


def _efficient(scaling: Scaling, throughput: Throughput, sizes: Sequence[int]) -> Choice:
    size = throughput.efficient(sizes, scaling.min_efficiency)
    if size is None:
        return Choice(None, "too little is measured to say how many nodes pay: it tries another number")
    return Choice(size, compare(scaling, throughput, sizes, size))


def compare(scaling: Scaling, throughput: Throughput, sizes: Sequence[int], size: int) -> str:
    """What speaks for a number of nodes: how much faster the next larger one is, or it than the next smaller one."""
    if len(sizes) == 1:
        return "no other number of nodes is allowed"
    at = sizes.index(size)
    fewer, more = (size, sizes[at + 1]) if at + 1 < len(sizes) else (sizes[at - 1], size)
    before, after = (throughput.speed(one) for one in (fewer, more))
    if before is None or after is None:
        return ""
    least = 1 + scaling.min_efficiency * (more / fewer - 1)
    verb = "are" if throughput.is_measured(fewer) and throughput.is_measured(more) else "would be"
    return (
        f"{more} nodes {verb} {after / before:.2f} times as fast as {fewer}, and {least:.2f} times is what "
        f"scaling.min_efficiency {scaling.min_efficiency:g} asks for"
    )


def _deadline(scaling: Scaling, throughput: Throughput, sizes: Sequence[int], outlook: Outlook) -> Choice:
    goal = scaling.finish_by
    if goal is None or outlook.steps is None:
        return _without_steps("finish_by")
    left = (goal - outlook.now).total_seconds()

    def spare(nodes: int, seconds: float) -> float:
        return left / seconds - 1 if seconds > 0 else float("inf")

    rests = _rests(scaling, throughput, sizes, outlook)
    present = rests.get(outlook.present)
    if len(rests) < len(sizes):
        urgent = present is not None and spare(outlook.present, present) < _TO_STAY
        return Choice(None, "too little is measured to say which number of nodes finishes in time", urgent=urgent)
    chosen = _first(sizes, rests, spare, outlook, float)
    late = present is not None and spare(outlook.present, present) < _TO_STAY
    if chosen is None:
        fastest = min(sizes, key=lambda nodes: (rests[nodes], nodes))
        over = rests[fastest] * (1 + _TO_CHANGE) - left
        beyond = _beyond(scaling, throughput, sizes, outlook, spare)
        what = (
            f"finish_by {_after(goal, over)} could be made"
            if beyond is None
            else f"{beyond} nodes could make it, by what was measured, and {sizes[-1]} are allowed"
        )
        text = (
            f"no number of nodes surely finishes by {_at(goal)}: {fastest}, the fastest, {do(fastest, 'finish')} at "
            f"{_after(outlook.now, rests[fastest])}; {what}"
        )
        return Choice(fastest, text, text, urgent=late)
    fewer = max((nodes for nodes in sizes if nodes < chosen), default=None)
    then = _after(outlook.now, rests[chosen])
    text = f"{counted(chosen, 'node', 'finish')} at {then}, and finish_by is {_at(goal)}"
    if fewer is not None:
        text += f"; {fewer} would at {_after(outlook.now, rests[fewer])}"
    return Choice(chosen, text, urgent=late)


def _budget(scaling: Scaling, throughput: Throughput, sizes: Sequence[int], outlook: Outlook) -> Choice:
    field = "max_cost" if scaling.max_cost is not None else "max_gpu_hours"
    if outlook.steps is None:
        return _without_steps(field)
    allowed = _hours_allowed(scaling, outlook)
    left = (allowed - outlook.node_hours) * _HOUR

    def spare(nodes: int, seconds: float) -> float:
        return left / (nodes * seconds) - 1 if seconds > 0 else float("inf")

    rests = _rests(scaling, throughput, sizes, outlook)
    if len(rests) < len(sizes):
        return Choice(None, f"too little is measured to say which number of nodes stays within {field}")
    by_speed = sorted(sizes, key=lambda nodes: (rests[nodes], nodes))
    chosen = _first(by_speed, rests, spare, outlook, rests.__getitem__)

    def spent(nodes: int) -> str:
        return _amount(scaling, outlook, _total_hours(outlook, nodes, rests[nodes]))

    limit = _amount(scaling, outlook, allowed)
    over = outlook.present in rests and spare(outlook.present, rests[outlook.present]) < _TO_STAY
    if chosen is None:
        cheapest = min(sizes, key=lambda nodes: (nodes * rests[nodes], nodes))
        text = (
            f"no number of nodes surely stays within {field} {limit}: {cheapest}, the cheapest, "
            f"{do(cheapest, 'take')} {spent(cheapest)} in all; the training goes on"
        )
        return Choice(cheapest, text, text, urgent=over)
    faster = max((nodes for nodes in by_speed if rests[nodes] < rests[chosen]), key=rests.__getitem__, default=None)
    text = f"{counted(chosen, 'node', 'take')} {spent(chosen)} in all, and {field} is {limit}"
    if faster is not None:
        text += f"; {faster} would take {spent(faster)}"
    return Choice(chosen, text, urgent=over)


def _first(
    ordered: Sequence[int],
    rests: dict[int, float],
    spare: Callable[[int, float], float],
    outlook: Outlook,
    worth: Callable[[int], float],
) -> int | None:
    """The first number that reaches the goal with something to spare; the present one, if it does with less and no
    other is worth a change.

    Args:
        ordered: The numbers, the best ones first.
        rests: Seconds that the rest takes with each.
        spare: What is to spare with a number.
        outlook: What is left.
        worth: What a number saves: fewer is better.
    """
    present = outlook.present
    fits = [nodes for nodes in ordered if nodes != present and spare(nodes, rests[nodes]) >= _TO_CHANGE]
    if present in rests and spare(present, rests[present]) >= _TO_STAY:
        return next((nodes for nodes in fits if worth(nodes) <= (1 - _WORTH_A_CHANGE) * worth(present)), present)
    return next(iter(fits), None)


def _beyond(
    scaling: Scaling,
    throughput: Throughput,
    sizes: Sequence[int],
    outlook: Outlook,
    spare: Callable[[int, float], float],
) -> int | None:
    """Few nodes that would reach the goal, of more than are allowed."""
    unit = sizes[1] - sizes[0] if len(sizes) > 1 else 1
    stride = unit * (1 + sizes[-1] * _LOOK_BEYOND // (unit * _MOST_LOOKS))
    for nodes in range(sizes[-1] + unit, sizes[-1] * _LOOK_BEYOND + 1, stride):
        seconds = _rest(scaling, throughput, outlook, nodes)
        if seconds is not None and spare(nodes, seconds) >= _TO_CHANGE:
            return nodes
    return None


def _rests(scaling: Scaling, throughput: Throughput, sizes: Sequence[int], outlook: Outlook) -> dict[int, float]:
    found = {nodes: _rest(scaling, throughput, outlook, nodes) for nodes in sizes}
    return {nodes: seconds for nodes, seconds in found.items() if seconds is not None}


def _rest(scaling: Scaling, throughput: Throughput, outlook: Outlook, nodes: int) -> float | None:
    """Seconds until the training is finished with this number of nodes; None where that is not known."""
    step = throughput.step(nodes)
    if step is None or outlook.steps is None:
        return None
    # Where each rank has a fixed number of samples, more nodes need fewer steps for the samples that are left.
    same = outlook.fixed_steps or scaling.batch is BatchSize.GLOBAL
    steps = outlook.steps * (1 if same else outlook.present / nodes)
    change = outlook.change.total_seconds() if nodes != outlook.present else 0.0
    return steps * step.seconds * outlook.pauses + change


def _hours_allowed(scaling: Scaling, outlook: Outlook) -> float:
    """Hours of nodes."""
    if scaling.max_cost is not None and scaling.price is not None:
        return scaling.max_cost / scaling.price
    return (scaling.max_gpu_hours or 0.0) / outlook.ranks


def _total_hours(outlook: Outlook, nodes: int, seconds: float) -> float:
    return outlook.node_hours + nodes * seconds / _HOUR


def _amount(scaling: Scaling, outlook: Outlook, node_hours: float) -> str:
    if scaling.max_cost is not None and scaling.price is not None:
        return f"{node_hours * scaling.price:,.2f}"
    return f"{node_hours * outlook.ranks:,.1f} h"


def _without_steps(field: str) -> Choice:
    text = (
        f"it is not known how many steps are left, so nothing is chosen for {field}: give scaling.steps, or have the "
        "script tell it with perdure_training.report(total=...)"
    )
    return Choice(None, text, text)


def _after(time: datetime, seconds: float) -> str:
    return _at(time + timedelta(seconds=seconds)) if seconds < _FORESEEN else "no time that can be told"


def _at(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
