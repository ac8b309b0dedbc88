"""Acts on a rank for which all others wait: two nodes exchange their places, or its node is replaced."""

from __future__ import annotations

from perdure.contract import ExchangePlaces, FailureClass, ReplaceNodes, RestartRanks, SlowCause
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    found, partner = case.interruption.slowness, case.interruption.partner
    if case.culprit.failure not in (FailureClass.STRAGGLER, FailureClass.THROTTLED) or found is None:
        return None
    slow = found.rank.node
    if partner is not None:
        return case.blame(
            'straggler/1 "machine or work: exchange two places"',
            ExchangePlaces(nodes=(slow, partner)),
            title=f"rank {found.rank.rank} is slow, and the others wait for it",
            rejected=(Rejected(ReplaceNodes(nodes=(slow,)), "a rank that is given longer samples looks the same"),),
        )
    if found.cause is SlowCause.MACHINE:
        rule, title = "it is slow at another place, too", f"node {slow} is slow at another place, too"
    else:
        rule, title = "recovery.on_straggler", f"rank {found.rank.rank} is slow, and the others wait for it"
    return case.blame(
        f'straggler/2 "{rule}: replace its node"',
        case.replace((slow,), elsewhere=True),
        RestartRanks(others=True),
        title=title,
        rejected=(Rejected(RestartRanks(), "its machine would be as slow again"),),
    )
