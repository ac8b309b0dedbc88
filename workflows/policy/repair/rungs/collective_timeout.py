"""Restarts ranks that waited for another one in vain, and replaces the node that is suspected a second time.

The rank that reports a timeout is not the one that hangs.
"""

from __future__ import annotations

from perdure.contract import EndHang, FailureClass, ReplaceNodes, RestartRanks
from perdure.workflows.policy.diagnosis.suspicion import names, suspected_again
from perdure.workflows.policy.record.action_words import replacement
from perdure.workflows.policy.repair import charges
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    culprit, suspects = case.culprit, case.suspects
    if culprit.failure is not FailureClass.COLLECTIVE_TIMEOUT:
        return None
    named = f"{names(suspects)} may hang" if suspects else "no node is known to hang"
    title = f"a collective timed out, {named}: {culprit.text}"
    futile = charges.failures_without_progress(case.state, culprit)
    again = suspected_again(case.state, suspects) if futile else None
    if again is not None and case.may_replace:
        replace = case.replace((again,), suspected=True)
        return Verdict(
            rule='collective-timeout/2 "the same node is suspected again, and no step was gained: replace it"',
            title=f"{title}, {replacement(replace)}",
            actions=(replace, RestartRanks(others=True)),
            failure=culprit.failure,
            suspects=suspects,
            rejected=(Rejected(RestartRanks(), "that was done for the last timeout"),),
        )
    why_not = "it is suspected only: it reported no timeout of its own" if suspects else "no evidence names one"
    return Verdict(
        rule='collective-timeout/1 "a rank did not come: restart in place"',
        title=title,
        actions=(EndHang(nodes=tuple(suspect.rank for suspect in suspects)),),
        failure=culprit.failure,
        suspects=suspects,
        rejected=(Rejected(ReplaceNodes(), why_not),),
    )
