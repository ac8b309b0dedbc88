"""Replaces a node whose command fails before there is any world."""

from __future__ import annotations

from perdure.contract import RestartCommands, StartCommands, Stop
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    if case.state.world is not None:
        return None
    nodes = (case.culprit.rank,)
    return case.blame(
        'failed-start/1 "replace the node, and try again a few times"',
        case.replace(nodes),
        StartCommands(nodes=nodes),
        rejected=(
            Rejected(RestartCommands(nodes=nodes), "it failed there; another machine may provide what it lacks"),
            Rejected(Stop(), "retry.no_progress_limit and max_restarts allow another try"),
        ),
    )
