"""Tries a script once more on another machine that cannot run on one node only: that one may lack something."""

from __future__ import annotations

from perdure.contract import FailureClass, RestartRanks, Stop
from perdure.spec.capabilities import CAPABILITIES
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict


def decide(case: Case) -> Verdict | None:
    nodes = (case.culprit.rank,)
    # Where several nodes report it, other machines were tried.
    alone = case.interruption.ranks_with(FailureClass.CANNOT_RUN) == frozenset(nodes)
    if not alone or not CAPABILITIES[case.job.backend].chooses_machines or not case.may_replace:
        return None
    return case.blame(
        'cannot-run/1 "one more try, on another machine"',
        case.replace(nodes, elsewhere=True),
        rejected=(
            Rejected(RestartRanks(), "what is missing there is still missing"),
            Rejected(Stop(), "another machine may have what this one lacks"),
        ),
    )
