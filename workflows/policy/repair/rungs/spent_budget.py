"""Stops the job where restarts gain no step, or where too many were needed within the window of the budget."""

from __future__ import annotations

from perdure.base.words import count, do
from perdure.spec.durations import format_duration
from perdure.workflows.policy.repair import charges
from perdure.workflows.policy.repair.case import Case, Verdict
from perdure.workflows.policy.repair.rungs.permanent_failure import stop


def decide(case: Case) -> Verdict | None:
    culprit, retry = case.culprit, case.job.retry
    if not case.traits.counts or case.interruption.counted:
        # The budgets do not limit this restart, or have already allowed it.
        return None
    exit_code = 1 if case.traits.users_own else 3
    if charges.failures_without_progress(case.state, culprit) > retry.no_progress_limit:
        limit = f"{count(retry.no_progress_limit, 'restart')} (retry.no_progress_limit)"
        reason = f"no progress over {limit}; last: {culprit.text}"
        return stop(case, 'no-progress/1 "restarts make no progress"', reason, exit_code)
    used = charges.restarts_in_window(case)
    if used >= retry.max_restarts and not charges.belongs_to_the_last(case, culprit.failure):
        restarts = f"{count(used, 'restart')} within {format_duration(retry.window)}"
        reason = f"{restarts} {do(used, 'use')} up retry.max_restarts; last: {culprit.text}"
        return stop(case, 'budget/1 "retry.max_restarts"', reason, exit_code)
    return None
