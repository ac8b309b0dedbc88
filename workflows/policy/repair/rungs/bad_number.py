"""Goes back to a state from before a loss that was not a number, or stops the job for it.

A fault that passes, such as a wrong result of a device, is gone after that. What comes again at the same step is the
script's own.
"""

from __future__ import annotations

from perdure.contract import ReplaceNodes, RestartRanks, Stop
from perdure.spec.recovery import OnNan
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict
from perdure.workflows.policy.repair.rungs.permanent_failure import stop


def decide(case: Case) -> Verdict | None:
    number, on_nan = case.culprit.number, case.job.recovery.on_nan
    if number is None or on_nan is OnNan.REPORT:
        return None
    if on_nan is OnNan.STOP:
        reason = f"{case.culprit.text}, and recovery.on_nan is stop"
        return stop(case, 'bad-number/1 "recovery.on_nan is stop"', reason, 1)
    unsound, generation = case.state.checkpoints.unsound, case.state.generation
    before = unsound.all if unsound is not None else ()
    found_at = max((one.found_at for one in before if one.generation < generation), default=-1)
    if number.step <= found_at:
        reason = f"{case.culprit.text}, and it was no number at step {found_at:,} before the job went back"
        return stop(case, 'bad-number/2 "the same again after going back"', reason, 1)
    return case.blame(
        'bad-number/3 "go back to a sound state, once for a step"',
        RestartRanks(),
        rejected=(
            Rejected(ReplaceNodes(nodes=(case.culprit.rank,)), "nothing else speaks against its machine"),
            Rejected(Stop(), "recovery.on_nan is rollback: it may not come again"),
        ),
    )
