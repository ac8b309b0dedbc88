"""Forms another world because a user requests it, or because the number of nodes changed."""

from __future__ import annotations

from perdure.contract import NewWorld
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.repair.case import Case, Verdict


def decide(case: Case) -> Verdict | None:
    requested = case.interruption.requested
    if requested is None:
        return None
    by_user = case.interruption.by_user
    return Verdict(
        rule=user_requests.RULE if by_user else 'capacity/1 "the best world for the available nodes"',
        title=requested,
        actions=(NewWorld(reason=requested),),
    )
