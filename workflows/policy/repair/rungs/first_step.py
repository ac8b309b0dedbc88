"""Restarts ranks that are alive and made no first step in time."""

from __future__ import annotations

from perdure.contract import ExtendFirstStep, FailureClass, ReplaceNodes, RestartRanks, Wait
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    culprit, state = case.culprit, case.state
    if culprit.failure is not FailureClass.HANG:
        return None
    # Where no node steps, all wait for each other: the first reporter need not be the one that hangs.
    others_step = any(node.stepped >= state.generation for node in state.members)
    known = culprit.rank if others_step else None
    return Verdict(
        rule='first-step/1 "no first step in time: restart in place"',
        title=culprit.text,
        actions=(RestartRanks(nodes=() if known is None else (known,)), ExtendFirstStep()),
        failure=culprit.failure,
        culprit=known,
        rejected=(
            Rejected(Wait(), "the time for the first step is over (timing.stall.first_step)"),
            Rejected(ReplaceNodes(), "its agent and launcher are alive"),
        ),
    )
