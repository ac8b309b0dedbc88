"""Forms another world because a user requests it, or because the number of nodes changed."""

from __future__ import annotations

from perdure.contract import NewWorld
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.repair.case import Case, Verdict


def decide(case: Case) -> Verdict | None:
    requested = case.interruption.requested
    if requested is None:
        return None
    if case.interruption.by_user:
        rule = user_requests.RULE
    elif case.state.checkpoints.older_because:
        rule = 'state/2 "what does not come back is not waited for"'
    elif case.interruption.begun_by:
        rule = 'roles/1 "starts again with another role"'
    else:
        rule = 'capacity/1 "the best world for the available nodes"'
    return Verdict(
        rule=rule,
        title=requested,
        actions=(NewWorld(reason=requested),),
    )
