"""Starts a command again that did not enter its world in time. The next time, its node is given up."""

from __future__ import annotations

from perdure.contract import FailureClass, ReplaceNodes, RestartCommands, RestartRanks, Wait
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    if case.culprit.failure is not FailureClass.RENDEZVOUS_TIMEOUT:
        return None
    nodes = (case.culprit.rank,)
    return case.blame(
        'rendezvous-timeout/1 "start its command again"',
        RestartCommands(nodes=nodes),
        RestartRanks(others=True),
        rejected=(
            Rejected(Wait(), "timing.rendezvous.enter_timeout is over"),
            Rejected(ReplaceNodes(nodes=nodes), "its agent is alive; done if the restart fails to enter, too"),
        ),
    )
