"""Stops the job at a failure that has come again with no step gained, and replaces the only machine that shows it.

A state that was loaded may be the cause as well as the script. Where the world continued from a checkpoint,
`retry.no_progress_limit` decides, and meanwhile older checkpoints are tried.
"""

from __future__ import annotations

from perdure.contract import RestartRanks, RestoreSource, Stop
from perdure.spec.capabilities import CAPABILITIES
from perdure.workflows.policy.repair import charges
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict
from perdure.workflows.policy.repair.rungs import spent_budget
from perdure.workflows.policy.repair.rungs.permanent_failure import stop
from perdure.workflows.policy.state.memory import RaisedError


def decide(case: Case) -> Verdict | None:
    if not case.traits.counts or case.interruption.counted:
        return None
    if charges.happens_again(case):
        rule = 'same-failure/1 "the same again, and no step gained"'
        return stop(case, rule, f"it failed again: {case.culprit.text}", 1)
    again = charges.raised_again(case)
    if again is None:
        return None
    if _is_one_machines(case, again):
        return spent_budget.decide(case) or _replace(case)
    if _continued_from_checkpoint(case):
        return None
    where = f"on {len(again.machines)} machines" if len(again.machines) > 1 else "after a restart"
    rule = 'same-error/1 "the same error at the same place, and no step gained"'
    return stop(case, rule, f"it failed again {where} ({again.raised_at}): {case.culprit.text}", 1)


def _is_one_machines(case: Case, again: RaisedError) -> bool:
    """Whether one machine shows the error, others take part in the world and do not, and another can be had."""
    chooses = CAPABILITIES[case.job.backend].chooses_machines and case.may_replace
    others = {charges.machine_of(node) for node in case.state.members} - set(again.machines)
    return chooses and not case.state.between_stages and len(again.machines) == 1 and bool(others)


def _replace(case: Case) -> Verdict:
    culprit = case.culprit
    shows = (one.rank for one in case.interruption.failures if one.raised_at == culprit.raised_at)
    return case.blame(
        'same-error/2 "the same error, on one machine only: replace it"',
        case.replace(tuple(sorted({culprit.rank, *shows})), elsewhere=True),
        RestartRanks(others=True),
        rejected=(
            Rejected(RestartRanks(), "that was done for the last one, and no step was gained"),
            Rejected(Stop(), "no other machine has shown the error"),
        ),
    )


def _continued_from_checkpoint(case: Case) -> bool:
    return any(
        incident.restored_step is not None
        and incident.restored_from is not RestoreSource.NOTHING
        and incident.generation_after == case.state.generation
        for incident in case.state.own_incidents
    )
