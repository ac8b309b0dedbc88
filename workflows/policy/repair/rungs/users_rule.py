"""Does what a rule of `retry.rules` says about a failure, within the budgets."""

from __future__ import annotations

from dataclasses import replace

from perdure.contract import FailureClass, RestartRanks
from perdure.spec.rules import RuleAction
from perdure.workflows.policy.diagnosis.failures import NODE_FAILURES
from perdure.workflows.policy.diagnosis.rules import Ruled, deciding
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict
from perdure.workflows.policy.repair.rungs import (
    capacity_loss,
    failed_command,
    failed_start,
    hanging_rank,
    rendezvous_timeout,
    restart_in_place,
    spent_budget,
)
from perdure.workflows.policy.repair.rungs.permanent_failure import stop

_RESTARTS = (
    capacity_loss.decide,
    hanging_rank.restart,
    rendezvous_timeout.decide,
    failed_start.decide,
    failed_command.decide,
    restart_in_place.decide,
)


def decide(case: Case) -> Verdict | None:
    ruled = deciding(case.job.retry.rules, case.causes)
    if ruled is None:
        return None
    case = replace(case, blamed=ruled.failure)
    verdict = _verdict(case, ruled)
    if verdict.stop is None and (spent := spent_budget.decide(case)) is not None:
        return spent
    # Who restarts a victim blames no one.
    blames = not case.traits.victim or ruled.rule.action is not RuleAction.RESTART
    return replace(verdict, rule=f'retry-rule/1 "{ruled.name}"', culprit=verdict.culprit if blames else None)


def _verdict(case: Case, ruled: Ruled) -> Verdict:
    lost = case.culprit.failure in NODE_FAILURES
    match ruled.rule.action:
        case RuleAction.STOP:
            return stop(case, "", f"{ruled.failure.text}; {ruled.name}", 1 if case.traits.users_own else 3)
        case RuleAction.REPLACE if case.state.world is not None and not lost and not _names_no_node(case):
            return _replace(case, ruled)
        case RuleAction.REPLACE | RuleAction.RESTART:
            return next(verdict for rung in _RESTARTS if (verdict := rung(case)) is not None)


def _names_no_node(case: Case) -> bool:
    """Whether ranks hang, and it is not known which node began it."""
    hang = case.interruption.hang
    return case.culprit.failure is FailureClass.RANK_HANG and hang is not None and hang.node is None


def _replace(case: Case, ruled: Ruled) -> Verdict:
    between, nodes = case.state.between_stages, (case.culprit.rank,)
    replacement = case.replace(nodes, elsewhere=True, between_worlds=between)
    return case.blame(
        "",
        *((replacement,) if between else (replacement, RestartRanks(others=True))),
        rejected=(Rejected(RestartRanks(), ruled.name),),
    )
