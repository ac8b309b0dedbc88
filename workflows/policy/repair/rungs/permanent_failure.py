"""Stops the job at a failure whose class says that it would come again."""

from __future__ import annotations

from perdure.contract import NewWorld, Stop
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    culprit, permanent = case.culprit, case.traits.stop
    if permanent is None:
        return None
    return stop(case, permanent.rule, culprit.text, permanent.exit_code)


def stop(case: Case, rule: str, reason: str, exit_code: int) -> Verdict:
    """The verdict to stop the job rather than to restart anything."""
    rejected = (Rejected(NewWorld(), reason),)
    return case.blame(rule, Stop(reason=reason, exit_code=exit_code), rejected=rejected)
