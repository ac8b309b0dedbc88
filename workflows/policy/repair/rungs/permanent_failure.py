"""Stops the job at a failure that would come again: its class, or an exit code of `retry.fatal_exit_codes`, says so."""

from __future__ import annotations

from perdure.contract import NewWorld, Stop
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    culprit, permanent = case.culprit, case.traits.stop
    if permanent is not None:
        return stop(case, permanent.rule, culprit.text, permanent.exit_code)
    if culprit.exit_code not in case.job.retry.fatal_exit_codes:
        return None
    why = ": programs exit with it when called with wrong arguments" if culprit.exit_code == 2 else ""
    reason = f"{culprit.text}; exit code {culprit.exit_code} is listed in retry.fatal_exit_codes{why}"
    return stop(case, 'fatal-exit-code/1 "retry.fatal_exit_codes"', reason, 1)


def stop(case: Case, rule: str, reason: str, exit_code: int) -> Verdict:
    """The verdict to stop the job rather than to restart anything."""
    rejected = (Rejected(NewWorld(), reason),)
    return case.blame(rule, Stop(reason=reason, exit_code=exit_code), rejected=rejected)
