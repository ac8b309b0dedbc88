"""Restarts ranks in place that lost their connections, where no culprit has reported."""

from __future__ import annotations

from perdure.contract import ReplaceNodes, RestartRanks
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    if not case.traits.victim:
        return None
    finished = [f"node {rank}" for rank, node in sorted(case.state.nodes.items()) if case.state.has_finished(node)]
    after = f" after {', '.join(finished)} had finished" if finished else ""
    return Verdict(
        rule='peers-lost/1 "no culprit reported: restart in place"',
        title=f"connections between ranks broke{after}: {case.culprit.text}",
        actions=(RestartRanks(),),
        failure=case.culprit.failure,
        rejected=(Rejected(ReplaceNodes(), "no evidence names one, and none is known lost"),),
    )
