"""Decides on what interrupts a job, records the decision in its incident, and carries it out."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from perdure.spec.job import JobSpec
from perdure.workflows.policy.checkpoints import trust
from perdure.workflows.policy.diagnosis import own_lines
from perdure.workflows.policy.diagnosis.classification import failed_by_themselves
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES
from perdure.workflows.policy.repair import actions, charges, ladder
from perdure.workflows.policy.repair.case import Case
from perdure.workflows.policy.state.job import RoleInJob


def recover(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Brings the interruption of a job as far as the reports allow."""
    interruption = state.interruption
    if interruption is None or interruption.decided:
        return state
    case = Case(state, interruption, job, now)
    verdict = ladder.decide(case)
    if verdict.wait is not None:
        is_known = interruption.waits == verdict.waits
        return state if is_known else state.replace(interruption=interruption.replace(waits=verdict.waits))
    counts = verdict.failure is None or FAILURE_CLASSES[verdict.failure].counts
    decided = interruption.replace(actions=verdict.actions, counted=counts or interruption.counted)
    if not interruption.counted:
        case = replace(case, state=trust.judge(state, verdict.failure, now))
    charged = charges.charge(case, verdict).replace(interruption=decided)
    also_failed = failed_by_themselves(interruption.failures) if verdict.failure is not None else ()
    return own_lines.compare(actions.apply(charged, verdict, now, also_failed=also_failed))
