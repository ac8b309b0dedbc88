"""Ends a rank that hangs: in place first, then on another node, and with the job where the script itself hangs."""

from __future__ import annotations

from perdure.contract import EndHang, FailureClass, Hang, HangKind, ReplaceNodes, RestartRanks
from perdure.spec.recovery import HangAction
from perdure.workflows.policy.record.action_words import replacement
from perdure.workflows.policy.repair import charges, memory
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict
from perdure.workflows.policy.repair.rungs.permanent_failure import stop


def decide(case: Case) -> Verdict | None:
    culprit, hang = case.culprit, case.interruption.hang
    if culprit.failure is not FailureClass.RANK_HANG or hang is None:
        return None
    if _is_the_script(case, hang):
        reason = f"the script hangs on several nodes, in {hang.at}: {culprit.text}"
        return stop(case, 'hang/3 "the same line on another node: it is the script"', reason, 1)
    why, in_place = _why_replace(case, hang)
    if hang.node is None or not why or not case.may_replace:
        return restart(case)
    replacing = case.replace((hang.node,), suspected=True)
    return case.blame(
        f'hang/2 "{why}: replace the node"',
        replacing,
        RestartRanks(others=True),
        title=f"{culprit.text}, {replacement(replacing)}",
        rejected=(Rejected(RestartRanks(), in_place),),
    )


def restart(case: Case) -> Verdict | None:
    """The verdict that restarts all ranks in place, if one of them hangs."""
    culprit, hang = case.culprit, case.interruption.hang
    if culprit.failure is not FailureClass.RANK_HANG or hang is None:
        return None
    if hang.node is None:
        return Verdict(
            rule='hang/1 "ranks wait for each other: restart in place"',
            title=culprit.text,
            actions=(EndHang(),),
            failure=culprit.failure,
            rejected=(Rejected(ReplaceNodes(), "no evidence names a node"),),
        )
    return case.blame(
        'hang/1 "a rank hangs: restart in place"',
        EndHang(nodes=(hang.node,)),
        title=culprit.text,
        rejected=(Rejected(ReplaceNodes(), "it is replaced if it hangs again"),),
    )


def _is_the_script(case: Case, hang: Hang) -> bool:
    """Whether a rank of another node has hung in the same line, and no step was gained since."""
    if not hang.at or not charges.failures_without_progress(case.state, case.culprit):
        return False
    since = case.now - case.job.retry.window
    past = (known for known in case.state.own_incidents if known.over_at is not None and known.noticed_at >= since)
    return any(
        known.hang is not None
        and known.hang.at == hang.at
        and (known.hang.node, known.hang.incarnation) != (hang.node, hang.incarnation)
        for known in past
    )


def _why_replace(case: Case, hang: Hang) -> tuple[str, str]:
    """Why the node is replaced, for the rule's name, and why its ranks are not restarted there; both empty where they
    are."""
    if case.job.recovery.on_hang is HangAction.REPLACE:
        return "recovery.on_hang", "recovery.on_hang is replace"
    if hang.kind is HangKind.KERNEL:
        return "no signal ends it", "the kernel ends no process that sleeps in it"
    if _hung_before(case, hang):
        return "the same node again", "that was done for the last hang"
    return "", ""


def _hung_before(case: Case, hang: Hang) -> bool:
    """Whether this incarnation of the node has hung before, within the window of the restart budget."""
    last = memory.last(case.state, EndHang, hang.node) if hang.node is not None else None
    return last is not None and last.incarnation == hang.incarnation and last.at >= case.now - case.job.retry.window
