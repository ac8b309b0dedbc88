"""Restarts ranks, or a command that was ended, on their nodes: the last rung, which always has a verdict."""

from __future__ import annotations

from perdure.contract import FailureClass, ReplaceNodes, RestartRanks, Shrink, StartCommands
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict:
    nodes = (case.culprit.rank,)
    rejected = (
        Rejected(ReplaceNodes(nodes=nodes), "its agent and launcher are alive"),
        Rejected(Shrink(), "no capacity is lost"),
    )
    if case.culprit.failure is FailureClass.COMMAND_LOST:
        rule = 'command-lost/1 "start it again on its node"'
        return case.blame(rule, StartCommands(nodes=nodes), RestartRanks(others=True), rejected=rejected)
    return case.blame('rank-failure/1 "restart in place"', RestartRanks(nodes=nodes), rejected=rejected)
