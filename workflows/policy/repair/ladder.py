"""The ladder of repairs: its rungs are asked in this order, and the first one that has a verdict decides.

The smallest repair that works comes first among those that fit the evidence. Every verdict names its rule and the
options that it did not take; `perdure explain` prints both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from perdure.contract import RestartCommands, RollBack
from perdure.spec.job import JobSpec
from perdure.workflows.policy.diagnosis.bad_numbers import newest_sound
from perdure.workflows.policy.diagnosis.corruption import newest_loaded
from perdure.workflows.policy.repair.case import Case, Verdict
from perdure.workflows.policy.repair.rungs import (
    another_machine,
    await_reports,
    bad_number,
    capacity_loss,
    collective_timeout,
    corruption,
    failed_command,
    failed_start,
    fatal_exit_code,
    first_step,
    hanging_rank,
    more_memory,
    new_world,
    own_timeout,
    peers_lost,
    permanent_failure,
    rendezvous_timeout,
    repeated_failure,
    restart_in_place,
    same_end,
    slow_rank,
    spent_budget,
    users_rule,
)
from perdure.workflows.policy.state.job import RoleInJob

Rung = Callable[[Case], Verdict | None]

RUNGS: tuple[Rung, ...] = (
    new_world.decide,
    await_reports.decide,
    permanent_failure.decide,
    users_rule.decide,
    fatal_exit_code.decide,
    own_timeout.decide,
    more_memory.decide,
    repeated_failure.decide,
    same_end.decide,
    spent_budget.decide,
    capacity_loss.decide,
    corruption.decide,
    bad_number.decide,
    first_step.decide,
    hanging_rank.decide,
    slow_rank.decide,
    collective_timeout.decide,
    peers_lost.decide,
    rendezvous_timeout.decide,
    failed_start.decide,
    failed_command.decide,
    another_machine.decide,
    restart_in_place.decide,
)


def decide(case: Case) -> Verdict:
    """The verdict on an interruption; while it is too early for one, to wait."""
    verdict = next(verdict for rung in RUNGS if (verdict := rung(case)) is not None)
    if verdict.stop or verdict.wait:
        return verdict
    verdict = more_memory.add(case, verdict)
    return replace(verdict, actions=(*verdict.actions, *_roll_back(case), *_other_commands(case, verdict)))


def next_look(state: RoleInJob, job: JobSpec, now: datetime) -> datetime | None:
    """The time until which the decision on the interruption waits; None where there is nothing to decide."""
    interruption = state.interruption
    if interruption is None or interruption.decided:
        return None
    wait = decide(Case(state, interruption, job, now)).wait
    return wait.until if wait is not None else None


def _roll_back(case: Case) -> tuple[RollBack, ...]:
    """Keeps the next world from states that may not be sound, whatever is done about the culprit."""
    failures = case.interruption.failures
    numbers = [failure.number for failure in failures if failure.number is not None]
    wrong = [failure.corruption for failure in failures if failure.corruption is not None]
    sound = [newest_sound(one) for one in numbers] + [newest_loaded(one, case.state.checkpoints) for one in wrong]
    if not sound:
        return ()
    return (RollBack(after=min(sound), found_at=min((number.step for number in numbers), default=-1)),)


def _other_commands(case: Case, verdict: Verdict) -> tuple[RestartCommands, ...]:
    """Starts commands over that must, too, whatever is done about the culprit."""
    state = case.state
    if state.between_stages:
        failed = {failure.rank for failure in case.interruption.failures}
        over = {rank for rank in failed if state.nodes[rank].alive and not state.nodes[rank].ended}
    else:
        over = case.missed
    known = {rank for action in verdict.actions if isinstance(action, RestartCommands) for rank in action.nodes}
    nodes = tuple(sorted(over - known - verdict.replaced))
    return (RestartCommands(nodes=nodes),) if nodes else ()
