"""Stops the job at an exit code of `retry.fatal_exit_codes`."""

from __future__ import annotations

from perdure.workflows.policy.repair.case import Case, Verdict
from perdure.workflows.policy.repair.rungs.permanent_failure import stop


def decide(case: Case) -> Verdict | None:
    culprit = case.culprit
    if culprit.exit_code not in case.job.retry.fatal_exit_codes:
        return None
    why = ": programs exit with it when called with wrong arguments" if culprit.exit_code == 2 else ""
    reason = f"{culprit.text}; exit code {culprit.exit_code} is listed in retry.fatal_exit_codes{why}"
    return stop(case, 'fatal-exit-code/1 "retry.fatal_exit_codes"', reason, 1)
