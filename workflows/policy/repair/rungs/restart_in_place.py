"""Restarts ranks, or a command that was ended, on their nodes: the last rung, which always has a verdict."""

from __future__ import annotations

from dataclasses import replace

from perdure.contract import FailureClass, ReplaceNodes, RestartRanks, Shrink, StartCommands
from perdure.workflows.policy.diagnosis.error_texts import is_unequal
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
    verdict = case.blame('rank-failure/1 "restart in place"', RestartRanks(nodes=nodes), rejected=rejected)
    if is_unequal(case.culprit.text):
        title = (
            f"ranks gave tensors of different sizes to one collective, as node {nodes[0]} found: {case.culprit.text}"
        )
        return replace(verdict, title=title, culprit=None)
    return verdict
