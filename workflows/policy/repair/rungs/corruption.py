"""Replaces a node whose device computes wrongly; restarts all ranks where it is not known which one does."""

from __future__ import annotations

from perdure.contract import ReplaceNodes, RestartRanks
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    if case.culprit.corruption is None:
        return None
    failures = case.interruption.failures
    named = tuple(sorted({one.rank for one in failures if one.corruption is not None and one.corruption.is_named}))
    if named:
        return case.blame(
            'corruption/1 "a device computes wrongly: replace its node"',
            case.replace(named, elsewhere=True),
            RestartRanks(others=True),
            rejected=(Rejected(RestartRanks(), "its device would compute wrongly again, without an error"),),
        )
    return Verdict(
        rule='corruption/2 "one of two ranks computes wrongly: restart in place"',
        title=case.culprit.text,
        actions=(RestartRanks(),),
        failure=case.culprit.failure,
        rejected=(Rejected(ReplaceNodes(), "a third rank would have to say which of them is wrong"),),
    )
