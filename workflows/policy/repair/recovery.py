"""Decides on what interrupts a job, records the decision in its incident, and carries it out."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from perdure.contract import Considered
from perdure.spec.job import JobSpec
from perdure.workflows.policy.checkpoints import trust
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES, failed_by_themselves
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import actions, ladder, memory
from perdure.workflows.policy.repair.case import Case, Verdict
from perdure.workflows.policy.state.job import RoleInJob


def recover(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Brings the interruption of a job as far as the reports allow."""
    interruption = state.interruption
    if interruption is None or interruption.decided:
        return state
    case = Case(state, interruption, job, now)
    verdict = ladder.decide(case)
    if verdict.wait is not None:
        return state
    counts = verdict.failure is None or FAILURE_CLASSES[verdict.failure].counts
    decided = interruption.model_copy(update={"actions": verdict.actions, "counted": counts or interruption.counted})
    if not interruption.counted:
        case = replace(case, state=trust.judge(state, verdict.failure, now))
    charged = memory.charge(case, verdict).replace(interruption=decided)
    return actions.carry_out(_record(charged, verdict, now), verdict, now)


def _record(state: RoleInJob, verdict: Verdict, now: datetime) -> RoleInJob:
    failures = state.interruption.failures if state.interruption is not None else ()
    return incidents.record_decision(
        state,
        now=now,
        title=verdict.title,
        rule=verdict.rule,
        action=actions.words(verdict.actions),
        failure=verdict.failure,
        culprit=verdict.culprit,
        considered=tuple(
            Considered(option=actions.option(rejected.action), why_not=rejected.why_not)
            for rejected in verdict.rejected
        ),
        suspects=verdict.suspects,
        stops=verdict.stop is not None,
        also_failed=failed_by_themselves(failures) if verdict.failure is not None else (),
    )
