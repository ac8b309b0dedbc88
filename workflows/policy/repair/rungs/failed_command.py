"""Starts a command again that failed between two worlds, and disturbs no other."""

from __future__ import annotations

from perdure.contract import ReplaceNodes, RestartCommands, RestartRanks
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    if not case.state.between_stages:
        return None
    nodes = (case.culprit.rank,)
    return case.blame(
        'command-failure/1 "start it again on its node"',
        RestartCommands(nodes=nodes, between_worlds=True),
        rejected=(
            Rejected(RestartRanks(others=True), "their commands continue"),
            Rejected(ReplaceNodes(nodes=nodes), "its agent and launcher are alive"),
        ),
    )
