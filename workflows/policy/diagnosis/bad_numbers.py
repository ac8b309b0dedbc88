"""Decides what a loss that is not a finite number means: the world continues with it, or is over.

After one rank all others soon have such a loss, and the report of the rank that was first need not come first. So the
job waits for the reports of the other nodes, for a moment, and takes the earliest step. A gradient norm that is not
finite interrupts nothing: where losses are scaled for half precision, such a step is left out, and the next is sound.

| a state is sound | because |
|-|-|
| two steps before the first bad loss, and all before that | the loss after it was finite |
| one step before it | *unknown*: the bad loss was computed from it |
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import FailureClass, NumberKind, RankNumber
from perdure.spec.job import JobSpec
from perdure.spec.recovery import OnNan
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.record import observations
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.role import SeenNumber

WAIT = timedelta(seconds=1)
"""Agents look at their ranks twice a second."""

_NAMED = 8
"""Reports that become evidence of an incident: after one rank all others have such a loss."""

_NAMES = {
    NumberKind.LOSS: "loss",
    NumberKind.GRADIENT_NORM: "gradient norm",
    NumberKind.LOSS_SPIKE: "loss",
    NumberKind.GRADIENT_NORM_SPIKE: "gradient norm",
    NumberKind.UNKNOWN: "number",
}


def judge(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Records the numbers that interrupt nothing, and ends a world whose loss is not a number if the job says so."""
    if not state.bad_numbers:
        return state
    losses = _interrupting(state, job)
    state = _record_others(state, job, now)
    if state.repairs_paused_until is not None:
        return _record_unrepaired(state, job, now)
    if not losses or (state.interruption is None and now < _due_at(state, job, losses)):
        return state
    ordered = sorted(losses, key=lambda one: _begins(one.number))
    for seen in ordered[:_NAMED]:
        failure = NodeFailure(
            rank=seen.node,
            failure=FailureClass.NUMERIC,
            time=seen.time,
            text=describe(seen.number, samples=True),
            certain=_begins(seen.number) == _begins(ordered[0].number),
            ranks=(seen.number.rank,),
            number=seen.number,
        )
        state = interrupt(state, failure, now=now, generation=seen.generation)
    return state.replace(bad_numbers=())


def next_look(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The time until which the job waits for the reports of the other nodes; None where it waits for none."""
    losses = _interrupting(state, job)
    return _due_at(state, job, losses) if losses else None


def newest_sound(number: RankNumber) -> int:
    """The newest step whose state is known to be sound, as far as one rank can say; below 0 for none."""
    return (number.step if number.last_finite is None else number.last_finite + 1) - 2


def _begins(number: RankNumber) -> tuple[int, int]:
    """Orders numbers by the steps at which the states of their ranks were spoiled: later ones follow from the first."""
    return newest_sound(number), number.step


def describe(number: RankNumber, *, samples: bool = False) -> str:
    """Describes a number, for people, with its samples if asked for and known."""
    text = f"the {_NAMES[number.kind]} of rank {number.rank} is {number.value} at step {number.step:,}"
    return f"{text}; {'; '.join(number.samples)}" if samples and number.samples else text


def _interrupting(state: RoleInJob, job: JobSpec) -> list[SeenNumber]:
    """The numbers that end the current world. One whose ranks have all finished is over anyway."""
    return [one for one in state.bad_numbers if _interrupts(state, job, one)]


def _interrupts(state: RoleInJob, job: JobSpec, seen: SeenNumber) -> bool:
    if job.recovery.on_nan is OnNan.REPORT or seen.number.kind is not NumberKind.LOSS:
        return False
    return state.world is not None and seen.generation == state.world.generation and not state.finished


def _record_unrepaired(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Records the losses that end no world for as long as repairs are paused."""
    losses = [seen for seen in _interrupting(state, job) if not seen.recorded]
    after = state
    for seen in losses:
        text = describe(seen.number, samples=True)
        after = observations.observe_unrepaired(after, seen.node, text, seen.time, now)
    known = tuple(one.replace(recorded=True) if one in losses else one for one in state.bad_numbers)
    return after.replace(bad_numbers=known) if losses else state


def _record_others(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    known: list[SeenNumber] = []
    after = state
    for seen in state.bad_numbers:
        is_news = not seen.recorded and not _interrupts(state, job, seen)
        if is_news:
            after = observations.observe_bad_number(after, seen, describe(seen.number), now)
        known.append(seen.replace(recorded=True) if is_news else seen)
    return after if after is state else after.replace(bad_numbers=tuple(known))


def _due_at(state: RoleInJob, job: JobSpec, losses: list[SeenNumber]) -> datetime:
    first = min(one.arrived_at for one in losses)
    all_reported = {node.rank for node in state.members if node.alive} <= {one.node for one in losses}
    return first if all_reported or job.recovery.on_nan is OnNan.STOP else first + WAIT
